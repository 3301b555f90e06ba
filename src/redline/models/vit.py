"""A vision transformer (pre-norm, class token, learned positions) with softmax attention written by hand.

The attention is deliberately the textbook form that much published code still uses: scores, softmax and the
weighted sum are three separate operations, and the scores are materialized.

B batch, N tokens, W width, H heads, D head width.
"""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """softmax(q kᵀ / √D) v as separate operations."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}.")
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BNW: Tensor) -> Tensor:
        B, N, W = x_BNW.shape
        qkv = self.qkv(x_BNW).reshape(B, N, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        q_BHND, k_BHND, v_BHND = qkv.unbind(0)
        scores_BHNN = q_BHND @ k_BHND.transpose(-2, -1) * self.scale
        mixed_BHND = scores_BHNN.softmax(dim=-1) @ v_BHND
        return self.out(mixed_BHND.transpose(1, 2).reshape(B, N, W))


class Block(nn.Module):
    """Attention and an MLP, each with pre-norm and a residual connection."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Maps images (B, 3, size, size) to logits (B, classes), computed from the class token."""

    def __init__(
        self, size: int = 224, patch: int = 16, width: int = 384, depth: int = 12, heads: int = 6, classes: int = 1000
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"size {size} is not a multiple of patch {patch}.")
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, Attention(width, heads)) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = self.blocks(tokens + self.positions)
        return self.head(self.norm(tokens[:, 0]))
