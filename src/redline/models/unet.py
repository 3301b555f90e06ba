"""Two U-Nets in sequence for live video diffusion: the first drafts the next frame, the second refines the draft.

Both take the previous frame and the time step. Each has five levels (64² down to 4² for a 64×64 frame) with widths of
1, 2, 4, 8 and 16 times the base width, so nearly all weights are at the lowest resolution (4×4). At batch 1 the forward
pass is therefore limited by memory bandwidth and kernel launches, not by arithmetic. To save launches, the time
conditioning of all levels is one matrix product, and its sinusoids are looked up instead of computed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MULTIPLIERS = (1, 2, 4, 8, 16)
STEPS = 1000  # time steps of the diffusion
HEAD_WIDTH = 64


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels)


def sinusoids(steps: int, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
    angles = torch.arange(steps)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    """Norm, SiLU and convolution, twice, and a shortcut; the time step scales and shifts the second norm's output."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm2 = _norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.shortcut = nn.Identity() if channels_in == channels else nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, scale_and_shift: Tensor) -> Tensor:
        scale, shift = scale_and_shift[:, :, None, None].chunk(2, dim=1)
        branch = self.conv1(F.silu(self.norm1(x)))
        branch = self.conv2(F.silu(self.norm2(branch) * (1 + scale) + shift))
        return self.shortcut(x) + branch


class SelfAttention(nn.Module):
    """Self-attention over all positions of a feature map."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.heads = inner // HEAD_WIDTH
        self.norm = _norm(channels)
        self.qkv = nn.Linear(channels, 3 * inner)
        self.out = nn.Linear(inner, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        qkv = self.qkv(tokens).view(batch, height * width, 3, self.heads, HEAD_WIDTH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """One U-Net, conditioned on the time step, with attention at the two smallest levels."""

    sinusoids: Tensor

    def __init__(self, base: int, channels_in: int, channels_out: int) -> None:
        super().__init__()
        if base % 8:
            raise ValueError(f"base width {base} is not a multiple of 8.")
        *outer, bottom = (base * m for m in MULTIPLIERS)
        embedding = 2 * base
        # Widths of the blocks in the order in which they run; each takes a slice of one projection of the time step.
        self.widths = (*outer, bottom, *reversed(outer))
        self.register_buffer("sinusoids", sinusoids(STEPS, base), persistent=False)
        self.time = nn.Sequential(nn.Linear(base, embedding), nn.SiLU(), nn.Linear(embedding, embedding), nn.SiLU())
        self.film = nn.Linear(embedding, 2 * sum(self.widths))

        self.stem = nn.Conv2d(channels_in, base, 3, padding=1)
        self.encoder = nn.ModuleList(Block(width, width) for width in outer)
        self.down = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1) for w in outer)
        self.encoder_attention = SelfAttention(outer[-1], outer[-1])
        self.bottom = Block(bottom, bottom)
        self.bottom_attention = SelfAttention(bottom, outer[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(outer))
        self.decoder = nn.ModuleList(Block(2 * width, width) for width in reversed(outer))
        self.decoder_attention = SelfAttention(outer[-1], outer[-1])
        self.norm = _norm(base)
        self.head = nn.Conv2d(base, channels_out, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        # The sinusoids are looked up before any conversion, because the time step 999 is not exact in bf16.
        film = self.film(self.time(self.sinusoids[timestep]))
        conditions = iter(film.split([2 * width for width in self.widths], dim=1))
        x = self.stem(x)
        skips = []
        for level, (block, down) in enumerate(zip(self.encoder, self.down, strict=True)):
            x = block(x, next(conditions))
            if level == len(self.encoder) - 1:
                x = self.encoder_attention(x)
            skips.append(x)
            x = down(x)
        x = self.bottom_attention(self.bottom(x, next(conditions)))
        for level, (up, block) in enumerate(zip(self.up, self.decoder, strict=True)):
            x = block(torch.cat([up(x), skips.pop()], dim=1), next(conditions))
            if level == 0:
                x = self.decoder_attention(x)
        return self.head(F.silu(self.norm(x)))


class VideoUNet(nn.Module):
    """Predicts the next frame from a noisy frame, its time step and the previous frame."""

    def __init__(self, base: int, channels: int = 3) -> None:
        super().__init__()
        self.draft = UNet(base, 2 * channels, channels)
        self.refine = UNet(base, 2 * channels, channels)

    def forward(self, frame: Tensor, timestep: Tensor, previous_frame: Tensor) -> Tensor:
        draft = self.draft(torch.cat([frame, previous_frame], dim=1), timestep)
        return draft + self.refine(torch.cat([draft, previous_frame], dim=1), timestep)
