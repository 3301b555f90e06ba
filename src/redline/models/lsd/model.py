"""LSD: a causal diffusion U-Net that restores or transforms live video frame by frame, given its previous output.

Inputs are three images in [-1, 1] (the noisy image, the camera's frame and the model's output for the previous frame),
the time step and an optional control vector. The output is the clean image: the frame plus a predicted change, blended
with blurred copies of the frame and with the previous output by predicted weights per pixel. To remove noise without
blending, the network would need as many channels as a patch has values; the blending weights are smooth, so a narrow
network can predict them. For the first frame of a video, the previous output is the frame itself.

The first layer turns patches into channels, so that no layer works at pixel resolution. There are no learned positions
and only the smallest levels have attention, so images may have any size; sides that are not multiples of
`config.multiple_px` are padded by replication and cropped again. The forward pass never synchronizes with the host, so
it can be compiled as one graph and captured as a CUDA graph.

B: batch, H and W: sides in pixels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.errors import ModelError
from redline.models.lsd.config import EIGHT, IMAGE_CHANNELS, IMAGES_BLENDED, LsdConfig
from redline.models.unet import HEAD_WIDTH, STEPS, Block, SelfAttention, sinusoids
from redline.nn.checkpointing import checkpointed

# The noise process and the prediction type with which to create samplers for this model.
PROCESS, PREDICTION = "flow", "sample"


class _Recomputing(nn.Module):
    """Runs submodules by `through`. If `recomputes` is set, backward recomputes their activations and cast weights."""

    recomputes: bool = False

    def through(self, part: nn.Module, *args: Tensor) -> Tensor:
        return checkpointed(part, *args) if self.recomputes else part(*args)


class Level(_Recomputing):
    """The blocks of one resolution, with optional self-attention."""

    def __init__(self, channels_in: int, channels: int, blocks: int, attends: bool) -> None:
        super().__init__()
        inputs = [channels_in, *[channels] * (blocks - 1)]
        self.blocks = nn.ModuleList(Block(before, channels) for before in inputs)
        inner = max(HEAD_WIDTH, channels // HEAD_WIDTH * HEAD_WIDTH)
        self.attention = SelfAttention(channels, inner) if attends else None

    def forward(self, x: Tensor, conditions: list[Tensor]) -> Tensor:
        for block, condition in zip(self.blocks, conditions, strict=True):
            x = self.through(block, x, condition)
        return x if self.attention is None else self.through(self.attention, x)


class Lsd(_Recomputing):
    """The U-Net: `forward(noisy, frame, previous, timestep, control)` returns the clean image of `frame`."""

    sinusoids: Tensor

    def __init__(self, config: LsdConfig) -> None:
        super().__init__()
        self.config = config
        widths, blocks = config.widths, config.blocks
        embedding = 4 * config.width
        self.register_buffer("sinusoids", torch.empty(STEPS, config.width), persistent=False)
        if not self.sinusoids.is_meta:
            self.reset_sinusoids()
        self.time = nn.Sequential(nn.Linear(config.width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.control = nn.Linear(config.control, embedding, bias=False) if config.control else None
        # One linear layer computes the scale and shift of all blocks, in the order in which they run.
        self._splits = [2 * width for width in (*widths, *reversed(widths[:-1])) for _ in range(blocks)]
        self.film = nn.Linear(embedding, sum(self._splits))
        self.stem = nn.Conv2d(config.channels_in, widths[0], 3, padding=1)
        attends = [index >= len(widths) - config.attending for index in range(len(widths))]
        self.encoder = nn.ModuleList(Level(w, w, blocks, attend) for w, attend in zip(widths, attends, strict=True))
        self.down = nn.ModuleList(
            nn.Conv2d(width, below, 3, stride=2, padding=1)
            for width, below in zip(widths[:-1], widths[1:], strict=True)
        )
        upward = list(zip(widths[:-1], widths[1:], attends[:-1], strict=True))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, width, 2, stride=2) for width, below, _ in upward)
        self.decoder = nn.ModuleList(Level(2 * width, width, blocks, attend) for width, _, attend in upward)
        self.norm = nn.GroupNorm(math.gcd(32, widths[0]), widths[0])
        self.head = nn.Conv2d(widths[0], config.channels_out, 3, padding=1)

    def recompute(self, wanted: bool = True) -> None:
        """Enables or disables activation checkpointing, which saves memory but costs one more forward pass."""
        for module in self.modules():
            if isinstance(module, _Recomputing):
                module.recomputes = wanted

    def reset_sinusoids(self) -> None:
        """Fills the table `sinusoids`, which is not saved.

        The forward pass looks up the row of each time step instead of computing it, because the step may not be exact
        in bf16 (999 is not).
        """
        with torch.no_grad():
            self.sinusoids.copy_(sinusoids(STEPS, self.config.width))

    def forward(
        self, noisy: Tensor, frame: Tensor, previous: Tensor, timestep: Tensor, control: Tensor | None = None
    ) -> Tensor:
        """Takes three images (B, 3, H, W), integer time steps (B,) below 1000 and control vectors (B, control)."""
        self._check(noisy, frame, previous, timestep, control)
        height, width = frame.shape[-2:]
        images = self._padded(torch.cat([noisy, frame, previous], dim=1))
        _, frame, previous = images.split(IMAGE_CHANNELS, dim=1)
        x = self._as_patches(images.to(self.stem.weight.dtype))
        conditions = self._conditions(timestep, control)
        blocks, x, skips = self.config.blocks, self.stem(x), []
        for index, level in enumerate(self.encoder):
            x = level(x, conditions[index * blocks : (index + 1) * blocks])
            if index < len(self.down):
                skips.append(x)
                x = self.through(self.down[index], x)
        after = conditions[len(self.encoder) * blocks :]
        for index, (up, level) in enumerate(zip(self.up, self.decoder, strict=True)):
            larger = torch.cat([self.through(up, x), skips.pop()], dim=1)
            x = level(larger, after[index * blocks : (index + 1) * blocks])
        patches = self.head(F.silu(self.norm(x)))[:, : (IMAGE_CHANNELS + IMAGES_BLENDED) * self.config.patch**2]
        predicted = F.pixel_shuffle(patches, self.config.patch)
        change, *weights = predicted.split((IMAGE_CHANNELS, *[1] * IMAGES_BLENDED), dim=1)
        soft = F.avg_pool2d(frame, 3, 1, 1, count_include_pad=False)
        softer = F.avg_pool2d(soft, 5, 1, 2, count_include_pad=False)
        restored = frame + change
        for weight, other in zip(weights, (soft, softer, previous), strict=True):
            restored = restored + weight * (other - frame)
        return restored[..., :height, :width]

    def _padded(self, x: Tensor) -> Tensor:
        below, beside = (self.config.padding_px(side) for side in x.shape[-2:])
        return F.pad(x, (0, beside, 0, below), mode="replicate") if below or beside else x

    def _as_patches(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.config.patch)
        missing = -x.shape[1] % EIGHT
        return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x

    def _conditions(self, timestep: Tensor, control: Tensor | None) -> list[Tensor]:
        embedding = self.time(self.sinusoids[timestep].to(self.stem.weight.dtype))
        if self.control is not None and control is not None:
            embedding = embedding + self.control(control.to(embedding.dtype))
        return list(self.through(self.film, F.silu(embedding)).split(self._splits, dim=1))

    def _check(self, noisy: Tensor, frame: Tensor, previous: Tensor, timestep: Tensor, control: Tensor | None) -> None:
        if frame.ndim != 4 or frame.shape[1] != IMAGE_CHANNELS or 0 in frame.shape:
            raise ModelError(f"an LSD takes images of shape (batch, 3, height, width), not {tuple(frame.shape)}.")
        if noisy.shape != frame.shape or previous.shape != frame.shape:
            shapes = f"{tuple(noisy.shape)}, {tuple(frame.shape)} and {tuple(previous.shape)}"
            raise ModelError(f"noisy image, frame and previous output must have the same shape, not {shapes}.")
        if timestep.shape != frame.shape[:1] or timestep.is_floating_point():
            raise ModelError("time steps must be integers, one for each image of the batch.")
        if control is not None and control.shape != (frame.shape[0], self.config.control):
            expected = (frame.shape[0], self.config.control)
            raise ModelError(f"control must have the shape {expected}, not {tuple(control.shape)}.")
