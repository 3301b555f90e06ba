"""DRCT's groups for inference on CPUs: tokens are ordered window by window from the first block to the last.

Only attention mixes tokens, so all other layers accept the rows in any order; a block with shifted windows reorders
the rows for its attention. Heads are zero-padded to multiples of 16 channels: with 46 or 122 channels, torch's fused
attention in bf16 takes two to three times as long. As in `gpu_inference.py`, the MLP's second layer is folded into the
next 1×1 convolution.

All layers remain `nn.Linear` and `nn.LayerNorm` modules, so that rungs (optimizations) that rewrite such modules
still find them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.models.drct.blocks import Block, Group
from redline.ops.window_attention.in_windows import (
    ImageGrid,
    attention_in_windows,
    image_order,
    reordering,
    window_order,
)
from redline.ops.window_attention.reference import relative_bias

_STEP = 16


class WindowedBlock(nn.Module):
    """A Swin block and the 1×1 convolution after it."""

    bias: Tensor

    def __init__(self, block: Block, adjust: nn.Linear) -> None:
        super().__init__()
        attention = block.attn
        heads = attention.relative_position_bias_table.shape[1]
        self.window, self.shift = attention.window, attention.shift
        self.size = attention.proj.in_features // heads
        self.norm1, self.norm2, self.fc1 = block.norm1, block.norm2, block.mlp.fc1
        padded = -(-self.size // _STEP) * _STEP
        head_rows = (torch.arange(heads)[:, None] * padded + torch.arange(self.size)).flatten()
        qkv_rows = torch.cat([part * heads * padded + head_rows for part in range(3)])
        qkv, proj, columns = attention.qkv, attention.proj, heads * padded
        with torch.no_grad():
            self.qkv = _linear(_scatter(qkv.weight, qkv_rows, 3 * columns), _scatter(qkv.bias, qkv_rows, 3 * columns))
            self.proj = _linear(_scatter(proj.weight.t(), head_rows, columns).t(), proj.bias)
            # With A, a = adjust and F, f = mlp.fc2: A(x + Fh + f) + a = Ax + (AF)h + (Af + a)
            through, inner = adjust.weight.double(), block.mlp.fc2
            self.adjust = _linear(adjust.weight, (adjust.bias + through @ inner.bias.double()).to(adjust.bias))
            self.adjust_hidden = _linear((through @ inner.weight.double()).to(adjust.weight))
            bias_HNN = relative_bias(attention.relative_position_bias_table, self.window).contiguous()
        self.register_buffer("bias", bias_HNN, persistent=False)

    def forward(self, rows_MC: Tensor, grid: ImageGrid) -> Tensor:
        tokens = rows_MC + self._attention(self.norm1(rows_MC), grid)
        return self.adjust(tokens) + self.adjust_hidden(F.gelu(self.fc1(self.norm2(tokens))))

    def _attention(self, rows_MC: Tensor, grid: ImageGrid) -> Tensor:
        sizes = (*grid, self.window)
        if self.shift:
            rows_MC = rows_MC.index_select(0, reordering(*sizes, 0, self.shift, rows_MC.device))
        mixed = attention_in_windows(self.qkv(rows_MC), self.bias, grid, self.shift, self.size**-0.5)
        rows_MC = self.proj(mixed)
        return rows_MC.index_select(0, reordering(*sizes, self.shift, 0, rows_MC.device)) if self.shift else rows_MC


class WindowedGroup(nn.Module):
    def __init__(self, group: Group, share: float) -> None:
        super().__init__()
        self.share = share
        self.blocks = nn.ModuleList(
            WindowedBlock(group.get_submodule(f"swin{index}"), group.get_submodule(f"adjust{index}"))  # pyrefly: ignore[bad-argument-type]
            for index in range(1, 6)
        )

    def forward(self, rows_MC: Tensor, grid: ImageGrid) -> Tensor:
        seen = rows_MC
        for block in self.blocks[:-1]:
            seen = torch.cat((seen, F.leaky_relu(block(seen, grid), 0.2)), -1)
        return rows_MC + self.share * self.blocks[-1](seen, grid)


class WindowedBody(nn.Module):
    """Applies all groups to tokens (B, H, W, C)."""

    def __init__(self, groups: nn.ModuleList, window: int, share: float) -> None:
        super().__init__()
        self.window = window
        self.groups = nn.ModuleList(WindowedGroup(group, share) for group in groups)  # pyrefly: ignore[bad-argument-type]

    def active_implementation(self) -> str:
        return "sdpa"

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        batch, height, width, channels = tokens_BHWC.shape
        grid = (batch, height, width)
        sizes = (*grid, self.window, 0, tokens_BHWC.device)
        rows_MC = tokens_BHWC.reshape(-1, channels).index_select(0, window_order(*sizes))
        for group in self.groups:
            rows_MC = group(rows_MC, grid)
        return rows_MC.index_select(0, image_order(*sizes)).view(tokens_BHWC.shape)


def _scatter(rows: Tensor, indices: Tensor, count: int) -> Tensor:
    """Returns `count` rows that contain `rows` at `indices` and zeros elsewhere."""
    return rows.new_zeros(count, *rows.shape[1:]).index_copy(0, indices.to(rows.device), rows)


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach())
    return layer
