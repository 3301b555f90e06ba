"""DRCT's groups for inference on GPUs: the same computation on rows that are padded for tensor cores.

No width of DRCT is a multiple of 8 (180, 212, 244, …), nor is any head dimension (30, 53, 122, …). Here every part of a
row (the first 180 channels, and the 32 that each block adds) and every head begins at a multiple of 8; the padding in
rows and weights is zero. A group keeps one wide row per token, into which each block writes the channels that it adds,
so that nothing is concatenated. LayerNorms are folded into the linear layers after them; the moments that a LayerNorm
needs (sum and sum of squares of each row) are computed by the kernels that write the row. The MLP's second layer F is
folded into the 1×1 convolution A after it, by A(x + Fh) = Ax + (AF)h. Convolutions use the channels_last format, in
which the channels of a token are contiguous too.

M: rows (the tokens of all images), K: input channels, N: output channels, P: blocks of channels with separate moments.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.models.drct.blocks import Block, Group
from redline.ops.fused_linear import auto_implementation, fused_linear, moment_parts, moments_in_parts
from redline.ops.fused_mlp import fused_mlp
from redline.ops.window_attention import expand_bias_table, window_attention_expanded

_STEP = 8


def padded(width: int) -> int:
    """Returns the width rounded up to a multiple of 8."""
    return -(-width // _STEP) * _STEP


def channel_indices(widths: Sequence[int]) -> Tensor:
    """Returns the position of each channel in a row that consists of these widths, each padded to a multiple of 8."""
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + padded(width))
    return torch.cat([start + torch.arange(width) for start, width in zip(starts, widths, strict=False)])


class PackedLinear(nn.Module):
    """A linear layer on padded rows, with the weights of a preceding LayerNorm folded in."""

    weight: Tensor
    bias: Tensor
    weight_sums: Tensor

    def __init__(
        self,
        layer: nn.Linear,
        inputs: Tensor,
        outputs: Tensor,
        norm: nn.LayerNorm | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """`inputs` and `outputs` are the `channel_indices` of inputs and outputs; `scale` multiplies each output."""
        super().__init__()
        weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
        self.channels, self.eps = 0, 0.0
        if norm is not None:
            bias = bias + weight @ norm.bias.detach().double()
            weight = weight * norm.weight.detach().double()
            self.channels, self.eps = weight.shape[1], norm.eps
        if scale is not None:
            scale = scale.to(weight)
            weight, bias = weight * scale[:, None], bias * scale
        inputs, outputs = inputs.to(weight.device), outputs.to(weight.device)
        columns, channels = padded(int(outputs[-1]) + 1), padded(int(inputs[-1]) + 1)
        whole = weight.new_zeros(columns, channels)
        whole[outputs[:, None], inputs[None, :]] = weight
        self.register_buffer("weight", whole.to(layer.weight.dtype), persistent=False)
        self.register_buffer(
            "bias", bias.new_zeros(columns).index_copy(0, outputs, bias).to(layer.bias.dtype), persistent=False
        )
        self.register_buffer("weight_sums", self.weight.float().sum(1), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        super()._apply(fn, recurse)
        # Recomputes the sums, which must match the weights after a change of dtype.
        self.weight_sums = self.weight.float().sum(1)
        return self

    @property
    def columns(self) -> int:
        return self.weight.shape[0]

    def forward(
        self,
        x_MK: Tensor,
        moments_P2M: Tensor | None = None,
        out_MN: Tensor | None = None,
        activation: str = "",
        residual_MN: Tensor | None = None,
        share: float = 1.0,
        new_moments_P2M: Tensor | None = None,
    ) -> Tensor:
        out_MN = x_MK.new_empty(x_MK.shape[0], self.columns) if out_MN is None else out_MN
        fused_linear(
            x_MK, self.weight, self.bias, out_MN, moments_P2M, self.weight_sums, self.channels, self.eps, activation,
            residual_MN, share, new_moments_P2M,
        )  # fmt: skip
        return out_MN


def fold_linear(inner: nn.Linear, outer: nn.Linear) -> nn.Linear:
    """Returns one layer that computes outer(x + inner(h)) from the concatenation [x | h]."""
    through = outer.weight.detach().double()
    weight = torch.cat((through, through @ inner.weight.detach().double()), 1)
    bias = outer.bias.detach().double() + through @ inner.bias.detach().double()
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = (nn.Parameter(tensor.to(outer.weight.dtype)) for tensor in (weight, bias))
    return layer


class PackedBlock(nn.Module):
    """A Swin block and the 1×1 convolution after it."""

    bias: Tensor

    def __init__(self, block: Block, adjust: nn.Linear, widths: Sequence[int], outputs: Tensor) -> None:
        super().__init__()
        attention, width = block.attn, block.norm1.normalized_shape[0]
        table = attention.relative_position_bias_table
        heads = table.shape[1]
        size = width // heads
        self.shift = attention.shift
        self.register_buffer("bias", expand_bias_table(table.detach(), attention.window), persistent=False)
        rows, head_channels = channel_indices(widths), channel_indices([size] * heads)
        hidden = torch.arange(block.mlp.fc1.out_features)
        # Attention divides by the square root of the padded head dimension; the scale of the queries compensates.
        scale = torch.ones(3, width)
        scale[0] = (padded(size) / size) ** 0.5
        qkv_channels = torch.cat([head_channels + part * heads * padded(size) for part in range(3)])
        self.qkv = PackedLinear(attention.qkv, rows, qkv_channels, block.norm1, scale.flatten())
        self.proj = PackedLinear(attention.proj, head_channels, rows)
        self.fc1 = PackedLinear(block.mlp.fc1, rows, hidden, block.norm2)
        both = torch.cat((rows, padded(int(rows[-1]) + 1) + hidden))
        self.adjust = PackedLinear(fold_linear(block.mlp.fc2, adjust), both, outputs)

    def forward(
        self,
        x_MK: Tensor,
        moments_P2M: Tensor,
        shape_BHW: tuple[int, int, int],
        out_MN: Tensor,
        new_moments_P2M: Tensor,
        residual_MN: Tensor | None = None,
        share: float = 1.0,
    ) -> None:
        """Writes the output of the block's 1×1 convolution, and its moments.

        Without a residual, applies the activation to the output. With a residual, adds `share` · output to it instead.
        """
        qkv = self.qkv(x_MK, moments_P2M).view(*shape_BHW, -1)
        mixed = window_attention_expanded(qkv, self.bias, self.shift)
        between = x_MK.new_empty((moment_parts(x_MK.shape[1]), 2, x_MK.shape[0]), dtype=torch.float32)
        tokens = self.proj(mixed.flatten(0, 2), residual_MN=x_MK, new_moments_P2M=between)
        inner, outer = self.fc1, self.adjust
        fused_mlp(
            tokens, inner.weight, inner.bias, outer.weight, outer.bias, out_MN, between, inner.weight_sums,
            inner.channels, inner.eps, "leaky_relu" if residual_MN is None else "", residual_MN, share, new_moments_P2M,
        )  # fmt: skip


class PackedGroup(nn.Module):
    def __init__(self, group: Group, width: int, growth: int, share: float) -> None:
        super().__init__()
        self.share, self.first, self.growth = share, padded(width), padded(growth)
        blocks: list[PackedBlock] = []
        for index in range(1, 6):
            block, adjust = group.get_submodule(f"swin{index}"), group.get_submodule(f"adjust{index}")
            outputs = torch.arange(growth if index < 5 else width)
            widths = [width] + [growth] * (index - 1)
            blocks.append(PackedBlock(block, adjust, widths, outputs))  # pyrefly: ignore[bad-argument-type]
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        row_MC: Tensor,
        moments_P2M: Tensor,
        shape_BHW: tuple[int, int, int],
        next_row: Tensor,
        next_moments: Tensor,
    ) -> None:
        """Completes `row_MC` and its moments; writes the group's output, with moments, to the start of `next_row`."""
        width, parts, new_parts = self.first, moment_parts(self.first), moment_parts(self.growth)
        for block in self.blocks[:-1]:
            new, of_new = row_MC[:, width : width + self.growth], moments_P2M[parts : parts + new_parts]
            block(row_MC[:, :width], moments_P2M[:parts], shape_BHW, new, of_new)
            width, parts = width + self.growth, parts + new_parts
        first, of_first = next_row[:, : self.first], next_moments[: moment_parts(self.first)]
        self.blocks[-1](row_MC, moments_P2M, shape_BHW, first, of_first, row_MC[:, : self.first], self.share)


class PackedBody(nn.Module):
    """Applies all groups to tokens (B, H, W, C)."""

    def __init__(self, groups: nn.ModuleList, width: int, growth: int, share: float) -> None:
        super().__init__()
        self.width, self.growth = width, growth
        self.groups = nn.ModuleList(
            PackedGroup(group, width, growth, share)  # pyrefly: ignore[bad-argument-type]
            for group in groups
        )

    def active_implementation(self) -> str:
        """Returns the implementation of the first linear layer."""
        weight = next(module.weight for module in self.modules() if isinstance(module, PackedLinear))
        return auto_implementation(weight, weight)

    def forward(self, tokens_BHWC: Tensor) -> Tensor:
        batch, height, width, channels = tokens_BHWC.shape
        first, growth = padded(self.width), padded(self.growth)
        rows_MC = F.pad(tokens_BHWC.reshape(-1, channels), (0, first + 4 * growth - channels))
        parts = moment_parts(first) + 4 * moment_parts(growth)
        sums_P2M = rows_MC.new_empty((parts, 2, len(rows_MC)), dtype=torch.float32)
        sums_P2M[: moment_parts(first)] = moments_in_parts(rows_MC[:, :first])
        for group in self.groups:
            next_rows, next_sums = torch.empty_like(rows_MC), torch.empty_like(sums_P2M)
            group(rows_MC, sums_P2M, (batch, height, width), next_rows, next_sums)
            rows_MC, sums_P2M = next_rows, next_sums
        return rows_MC[:, : self.width].view(batch, height, width, self.width)


class ChannelsLastPixelShuffle(nn.Module):
    """PixelShuffle for channels sorted by output pixel, so that the channels of each output pixel stay contiguous."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_BKHW: Tensor) -> Tensor:
        batch, height, width, features = (x_BKHW.shape[0], *x_BKHW.shape[2:], x_BKHW.shape[1] // self.factor**2)
        # Each input pixel becomes `factor` × `factor` output pixels, which its channels hold line by line. Moving the
        # dimension of these lines before the dimension of the width gives the lines of the enlarged image.
        lines = x_BKHW.permute(0, 2, 3, 1).reshape(batch, height, width, self.factor, self.factor * features)
        grown = lines.transpose(2, 3).reshape(batch, height * self.factor, width * self.factor, features)
        return grown.permute(0, 3, 1, 2)


def reorder_outputs(convolution: nn.Conv2d, factor: int) -> nn.Conv2d:
    """Permutes the output channels from the order of PixelShuffle to that of ChannelsLastPixelShuffle."""
    order = torch.arange(convolution.out_channels).unflatten(0, (-1, factor**2)).t().flatten()
    with torch.no_grad():
        convolution.weight.copy_(convolution.weight[order.to(convolution.weight.device)])
        if convolution.bias is not None:
            convolution.bias.copy_(convolution.bias[order.to(convolution.bias.device)])
    return convolution


def pack_upsampling(steps: nn.Sequential) -> nn.Sequential:
    packed: list[nn.Module] = []
    pairs = list(steps)
    for convolution, shuffle in zip(pairs[::2], pairs[1::2], strict=True):
        assert isinstance(convolution, nn.Conv2d) and isinstance(shuffle, nn.PixelShuffle)
        factor = shuffle.upscale_factor
        packed += [reorder_outputs(convolution, factor), ChannelsLastPixelShuffle(factor)]
    return nn.Sequential(*packed)
