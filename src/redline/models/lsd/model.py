"""A diffusion U-Net that restores or transforms a video as it comes, frame by frame, looking at its own last output.

It takes three pictures in [-1, 1] (the picture being denoised, the frame from the camera, and its own output for the
frame before), the time step, and perhaps a control vector; it gives the clean picture: the frame, changed, and blended
with softer copies of itself and with the previous output, by weights that it gives for every pixel. Taking noise out by
the change alone would need as many channels as a patch has values; weights are smooth, and a narrow network has them to
give. With no frame before it, a frame is its own history.

Patches become channels first, so that no layer works on single pixels. There are no positions to learn and attention
runs on the smallest levels alone, so any size of picture goes; sides that are no multiple of `config.multiple_px` are
padded with their edge and cut off again. Nothing asks the device for a value, so a forward pass can be compiled whole
and recorded as a CUDA graph.

B: batch, H and W: sides in pixels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.errors import ModelError
from redline.models.lsd.config import EIGHT, PICTURE_CHANNELS, PICTURES_BLENDED, LsdConfig
from redline.models.unet.model import HEAD_WIDTH, STEPS, Block, SelfAttention
from redline.nn.checkpointing import checkpointed

# What samplers need to know: how noise and picture are mixed at a time step, and what the model says about them.
PROCESS, PREDICTION = "flow", "sample"


class _Recomputing(nn.Module):
    """What its parts compute on the way, and autocast's copies of their weights, may be thrown away: they are made
    again for the gradient."""

    recomputes: bool = False

    def through(self, part: nn.Module, *args: Tensor) -> Tensor:
        return checkpointed(part, *args) if self.recomputes else part(*args)


class Level(_Recomputing):
    """The blocks of one size of picture, and attention where the level has it."""

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
    """`forward(noisy, frame, previous, timestep, control)` gives the clean picture of `frame`."""

    sinusoids: Tensor

    def __init__(self, config: LsdConfig) -> None:
        super().__init__()
        self.config = config
        widths, blocks = config.widths, config.blocks
        embedding = 4 * config.width
        self.register_buffer("sinusoids", torch.empty(STEPS, config.width), persistent=False)
        self.reset_sinusoids()
        self.time = nn.Sequential(nn.Linear(config.width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.control = nn.Linear(config.control, embedding, bias=False) if config.control else None
        # The conditions of all blocks are one product, in the order in which they run.
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
        """Less memory in training, for a forward pass more."""
        for module in self.modules():
            if isinstance(module, _Recomputing):
                module.recomputes = wanted

    def reset_sinusoids(self) -> None:
        """Fills the one buffer that no file holds; a look-up survives half precision, where step 999 would not."""
        half = self.config.width // 2
        frequencies = torch.exp(-math.log(10_000) * torch.arange(half) / half)
        angles = torch.arange(STEPS)[:, None] * frequencies
        with torch.no_grad():
            self.sinusoids.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(
        self, noisy: Tensor, frame: Tensor, previous: Tensor, timestep: Tensor, control: Tensor | None = None
    ) -> Tensor:
        """Three pictures (B, 3, H, W), time steps (B,) of whole numbers below 1000, a control vector (B, control)."""
        self._check(noisy, frame, previous, timestep, control)
        height, width = frame.shape[-2:]
        pictures = self._padded(torch.cat([noisy, frame, previous], dim=1))
        _, frame, previous = pictures.split(PICTURE_CHANNELS, dim=1)
        x = self._as_patches(pictures.to(self.stem.weight.dtype))
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
        patches = self.head(F.silu(self.norm(x)))[:, : (PICTURE_CHANNELS + PICTURES_BLENDED) * self.config.patch**2]
        said = F.pixel_shuffle(patches, self.config.patch)
        change, *weights = said.split((PICTURE_CHANNELS, *[1] * PICTURES_BLENDED), dim=1)
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
        if frame.ndim != 4 or frame.shape[1] != PICTURE_CHANNELS or 0 in frame.shape:
            raise ModelError(f"an LSD takes pictures of shape (batch, 3, height, width), not {tuple(frame.shape)}.")
        if noisy.shape != frame.shape or previous.shape != frame.shape:
            shapes = f"{tuple(noisy.shape)}, {tuple(frame.shape)} and {tuple(previous.shape)}"
            raise ModelError(f"the noisy picture, the frame and the previous output have one shape, not {shapes}.")
        if timestep.shape != frame.shape[:1] or timestep.is_floating_point():
            raise ModelError("time steps are whole numbers, one for each picture of the batch.")
        if control is not None and control.shape != (frame.shape[0], self.config.control):
            found = tuple(control.shape)
            raise ModelError(f"this LSD takes control vectors of {self.config.control} entries, not {found}.")
