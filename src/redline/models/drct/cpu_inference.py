"""DRCT's groups as CPUs want them, for inference: rows stand window by window from the first block to the last.

Only attention sees more than one token, so all else takes the rows in any order; blocks with shifted windows take them
in another one. Heads are filled up with zeros to multiples of 16 channels: with 46 or 122, torch's fused attention in
bf16 takes two to three times as long. As in `packed.py`, the MLP's second layer goes into the convolution behind it.

The layers stay linear layers and norms, so that rungs that change these still find them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.models.drct.blocks import Block, Group
from redline.ops.window_attention.in_windows import (
    Picture,
    attention_in_windows,
    picture_order,
    reordering,
    window_order,
)
from redline.ops.window_attention.reference import relative_bias

_STEP = 16


class WindowedBlock(nn.Module):
    """A Swin block, and the 1×1 convolution behind it."""

    bias: Tensor

    def __init__(self, block: Block, adjust: nn.Linear) -> None:
        super().__init__()
        attention = block.attn
        heads = attention.relative_position_bias_table.shape[1]
        self.window, self.shift = attention.window, attention.shift
        self.size = attention.proj.in_features // heads
        self.norm1, self.norm2, self.fc1 = block.norm1, block.norm2, block.mlp.fc1
        filled = -(-self.size // _STEP) * _STEP
        of_heads = (torch.arange(heads)[:, None] * filled + torch.arange(self.size)).flatten()
        of_qkv = torch.cat([part * heads * filled + of_heads for part in range(3)])
        qkv, proj, columns = attention.qkv, attention.proj, heads * filled
        with torch.no_grad():
            self.qkv = _linear(_rows(qkv.weight, of_qkv, 3 * columns), _rows(qkv.bias, of_qkv, 3 * columns))
            self.proj = _linear(_rows(proj.weight.t(), of_heads, columns).t(), proj.bias)
            # A(x + Fh + f) = (Ax + Af) + (AF)h
            through, inner = adjust.weight.double(), block.mlp.fc2
            self.adjust = _linear(adjust.weight, (adjust.bias + through @ inner.bias.double()).to(adjust.bias))
            self.adjust_hidden = _linear((through @ inner.weight.double()).to(adjust.weight))
            bias_HNN = relative_bias(attention.relative_position_bias_table, self.window).contiguous()
        self.register_buffer("bias", bias_HNN, persistent=False)

    def forward(self, rows_MC: Tensor, picture: Picture) -> Tensor:
        tokens = rows_MC + self._attention(self.norm1(rows_MC), picture)
        return self.adjust(tokens) + self.adjust_hidden(F.gelu(self.fc1(self.norm2(tokens))))

    def _attention(self, rows_MC: Tensor, picture: Picture) -> Tensor:
        sizes = (*picture, self.window)
        if self.shift:
            rows_MC = rows_MC.index_select(0, reordering(*sizes, 0, self.shift, rows_MC.device))
        mixed = attention_in_windows(self.qkv(rows_MC), self.bias, picture, self.shift, self.size**-0.5)
        rows_MC = self.proj(mixed)
        return rows_MC.index_select(0, reordering(*sizes, self.shift, 0, rows_MC.device)) if self.shift else rows_MC


class WindowedGroup(nn.Module):
    def __init__(self, group: Group, share: float) -> None:
        super().__init__()
        self.share = share
        self.blocks = nn.ModuleList(
            WindowedBlock(group.get_submodule(f"swin{index}"), group.get_submodule(f"adjust{index}"))  # pyright: ignore[reportArgumentType]
            for index in range(1, 6)
        )

    def forward(self, rows_MC: Tensor, picture: Picture) -> Tensor:
        seen = rows_MC
        for block in self.blocks[:-1]:
            seen = torch.cat((seen, F.leaky_relu(block(seen, picture), 0.2)), -1)
        return rows_MC + self.share * self.blocks[-1](seen, picture)


class WindowedBody(nn.Module):
    """All groups: takes and gives tokens (B, H, W, C)."""

    def __init__(self, groups: nn.ModuleList, window: int, share: float) -> None:
        super().__init__()
        self.window = window
        self.groups = nn.ModuleList(WindowedGroup(group, share) for group in groups)  # pyright: ignore[reportArgumentType]

    def chosen(self) -> str:
        return "sdpa"

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        batch, height, width, channels = tokens_BHWC.shape
        picture = (batch, height, width)
        sizes = (*picture, self.window, 0, tokens_BHWC.device)
        rows_MC = tokens_BHWC.reshape(-1, channels).index_select(0, window_order(*sizes))
        for group in self.groups:
            rows_MC = group(rows_MC, picture)
        return rows_MC.index_select(0, picture_order(*sizes)).view(tokens_BHWC.shape)


def _rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """`count` rows, these in their places, zero between."""
    return rows.new_zeros(count, *rows.shape[1:]).index_copy(0, places.to(rows.device), rows)


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach())
    return layer
