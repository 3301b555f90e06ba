"""The fused MLP with a Triton kernel, registered as a custom op for torch.compile.

If the rows or the results are too wide for one program, or the dtype is fp32, it runs two fused linear layers.

M: rows, K: input channels, H: hidden channels, N: output columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.ops import kernel
from redline.ops.fused_linear import triton as linear
from redline.ops.fused_linear.reference import MOMENT_COLUMNS
from redline.ops.fused_linear.triton_kernels import STEP
from redline.ops.fused_mlp.triton_kernels import mlp_kernel

INTERPRETED = kernel.INTERPRETED


@dataclass(frozen=True)
class MlpTiles:
    """Rows per program, hidden channels per step, warps, and pipeline stages of the single-kernel implementation."""

    rows: int
    hidden: int
    warps: int
    stages: int


# Up to 32 output columns, the key is the class of the row width; otherwise it is "many columns". All but "widest" were
# the fastest of eight on an H200 (docs/log.md).
MLP_TILES = {
    "narrow": MlpTiles(128, 64, 8, 2),
    "wide": MlpTiles(256, 32, 8, 3),
    "widest": MlpTiles(128, 32, 8, 2),
    "many columns": MlpTiles(128, 32, 8, 2),
}
_NARROW, _WIDE = 192, 288
_FEW, _MANY = 32, 192
# The widest rows that leave enough shared memory for the weights, and the shared memory that such rows need.
_MOST_CHANNELS = 320
_SHARED_BYTES = 200 * 2**10


def why_not(x_MK: Tensor, inner_HK: Tensor, outer_NJ: Tensor) -> str:
    """Returns why the kernels do not support this input, or an empty string."""
    return linear.why_not(x_MK, inner_HK) or linear.why_not(x_MK, outer_NJ)


@torch.library.custom_op("redline::fused_mlp", mutates_args=("out", "new_moments"))
def fused_mlp(
    x: Tensor,
    inner: Tensor,
    inner_bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
    out: Tensor,
    moments: Tensor,
    inner_sums: Tensor,
    channels: int,
    eps: float,
    activation: str,
    residual: Tensor | None,
    share: float,
    new_moments: Tensor | None,
) -> None:
    """Computes the reference function in fp32, except that the hidden activations are rounded to the dtype of x."""
    rows, (hidden, wide), columns = x.shape[0], inner.shape, outer.shape[0]
    if columns > _MANY or not is_fusable(x):
        both = x.new_empty(rows, wide + hidden)
        both[:, :wide] = x
        linear.fused_linear(
            x, inner, inner_bias, both[:, wide:], moments, inner_sums, channels, eps, "gelu", None, 1.0, None
        )
        linear.fused_linear(both, outer, outer_bias, out, None, None, 0, eps, activation, residual, share, new_moments)
        return
    old, new = (x if tensor is None else tensor for tensor in (residual, new_moments))
    whole = (inner, inner_bias, inner_sums, outer, outer_bias, moments)
    linear.check_layout((x, out, old), whole if new_moments is None else (*whole, new_moments))
    blocks = -(-rows // tiles_for(wide, columns).rows)
    kernel.launch(
        mlp_kernel, (blocks,), x, inner, inner_bias, inner_sums, moments, outer, outer_bias, old, new, out,
        rows, wide // STEP, hidden // STEP, columns // STEP, moments.shape[0],
        x.stride(0) // STEP, old.stride(0) // STEP, out.stride(0) // STEP, float(channels), eps, share,
        **constants(wide, columns, activation, residual is not None, new_moments is not None),
    )  # fmt: skip


@fused_mlp.register_fake
def _(*_: object) -> None:
    return None


def is_fusable(x: Tensor) -> bool:
    small = x.element_size() == 2 and sum(kernel.pieces(x.shape[1])) <= _MOST_CHANNELS
    return small and kernel.shared_bytes(x) >= _SHARED_BYTES


def tiles_for(channels: int, columns: int) -> MlpTiles:
    if columns > _FEW:
        return MLP_TILES["many columns"]
    width = sum(kernel.pieces(channels))
    return MLP_TILES["narrow" if width <= _NARROW else "wide" if width <= _WIDE else "widest"]


def constants(channels: int, columns: int, activation: str, residual: bool, moments: bool) -> dict[str, object]:
    """Returns the compile-time constants of the kernel."""
    chosen = tiles_for(channels, columns)
    first, rest = kernel.pieces(channels)
    return {
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "MOMENTS": moments,
        "BLOCK_M": chosen.rows,
        "BLOCK_H": chosen.hidden,
        "FIRST": first,
        "REST": rest,
        # Each piece of the output columns is one part of the moments.
        "OUT": min(MOMENT_COLUMNS, kernel.padded(columns)),
        "OUT_REST": kernel.padded(columns - MOMENT_COLUMNS) if columns > MOMENT_COLUMNS else 0,
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
