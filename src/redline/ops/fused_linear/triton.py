"""The fused linear layer with Triton kernels, registered as a custom op for torch.compile.

M: rows, K: input channels, N: output columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redline.errors import ModelError
from redline.ops import kernel
from redline.ops.fused_linear.triton_kernels import STEP, descriptor_kernel, linear_kernel


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and channels per block, warps per program, and pipeline stages."""

    rows: int
    columns: int
    channels: int
    warps: int
    stages: int


# Keyed by element size in bytes and by the number of columns: few (up to 32), some (up to 64) or many. "parts" replaces
# "many" if moments are written: each program then writes the moments of its block of 128 columns. For two bytes, "few",
# "many" and "parts" were the fastest of many settings for DRCT-L on an H200 (docs/log.md); "some" and the entries for
# four bytes are not tuned.
TILES = {
    (2, "few"): Tiles(256, 32, 64, 8, 2),
    (2, "some"): Tiles(128, 64, 64, 4, 3),
    (2, "many"): Tiles(128, 128, 64, 4, 3),
    (2, "parts"): Tiles(128, 128, 64, 4, 3),
    (4, "few"): Tiles(64, 32, 32, 4, 2),
    (4, "some"): Tiles(64, 64, 32, 4, 2),
    (4, "many"): Tiles(64, 128, 32, 8, 2),
    (4, "parts"): Tiles(64, 128, 32, 8, 2),
}
_FEW, _SOME = 32, 64

# Used for more than 64 columns of two-byte elements if the GPU has tensor descriptors. The fastest of nine settings for
# DRCT-L on an H200, 7 to 16% faster than "many" and "parts" (docs/log.md).
DESCRIPTOR_TILES = Tiles(128, 128, 64, 4, 3)


def why_not(x_MK: Tensor, weight_NK: Tensor) -> str:
    reason = kernel.why_not(x_MK)
    if reason:
        return reason
    if weight_NK.dtype != x_MK.dtype:
        return f"weight_NK is {weight_NK.dtype}, but x_MK is {x_MK.dtype}"
    for name, size in (("channels", x_MK.shape[1]), ("columns", weight_NK.shape[0])):
        if size % STEP:
            return f"{name} must be a multiple of {STEP}, not {size}"
    return ""


@kernel.custom_op("fused_linear", lambda *_: None, mutates=("out", "new_moments"))
def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    moments: Tensor | None,
    weight_sums: Tensor | None,
    channels: int,
    eps: float,
    activation: str,
    residual: Tensor | None,
    share: float,
    new_moments: Tensor | None,
) -> None:
    """Computes the same as the reference. The product and the epilogue are computed in fp32 and rounded once."""
    (rows, wide), columns = x.shape, weight.shape[0]
    # The kernels need a pointer even for an argument that is None, but do not read it, so they get the pointer of x.
    sums_or_x, moments_or_x, old, new = (
        x if tensor is None else tensor for tensor in (weight_sums, moments, residual, new_moments)
    )
    sums = (tensor for tensor in (weight_sums, moments, new_moments) if tensor is not None)
    check_layout((x, weight, out, old), (weight, bias, *sums))
    around = (moments is not None, activation, residual is not None, new_moments is not None)
    parts = 0 if moments is None else moments.shape[0]
    sizes = (rows, wide // STEP, columns // STEP, parts)
    if columns > _SOME and x.element_size() == 2 and kernel.has_descriptors(x):
        tiles = DESCRIPTOR_TILES
        descriptors = (
            TensorDescriptor.from_tensor(tensor, [height, width])
            for tensor, height, width in (
                (x, tiles.rows, tiles.channels),
                (weight, tiles.columns, tiles.channels),
                (out if residual is None else residual, tiles.rows, tiles.columns),
                (out, tiles.rows, tiles.columns),
            )
        )
        kernel.launch(
            descriptor_kernel, (blocks(rows, columns, tiles),), bias, sums_or_x, moments_or_x, new, *descriptors,
            *sizes, float(channels), eps, share, **constants(tiles, *around),
        )  # fmt: skip
        return
    tiles = TILES[x.element_size(), kind(columns, new_moments is not None)]
    kernel.launch(
        linear_kernel, (blocks(rows, columns, tiles),), x, weight, bias, sums_or_x, moments_or_x, old, new, out,
        *sizes, x.stride(0) // STEP, old.stride(0) // STEP, out.stride(0) // STEP, float(channels), eps, share,
        PRECISION=kernel.dot_precision(x.dtype), **constants(tiles, *around),
    )  # fmt: skip


def kind(columns: int, with_moments: bool) -> str:
    if columns <= _SOME:
        return "few" if columns <= _FEW else "some"
    return "parts" if with_moments else "many"


def blocks(rows: int, columns: int, tiles: Tiles) -> int:
    return -(-rows // tiles.rows) * -(-columns // tiles.columns)


def check_layout(rows: Iterable[Tensor], whole: Iterable[Tensor]) -> None:
    for tensor in rows:
        if tensor.stride(1) != 1 or tensor.stride(0) % STEP or tensor.data_ptr() % (STEP * tensor.element_size()):
            raise ModelError(
                f"fused_linear: rows of x, out and residual must be contiguous and must start at multiples of {STEP} "
                f"elements, not have strides {tensor.stride()}."
            )
    if not all(tensor.is_contiguous() for tensor in whole):
        raise ModelError("fused_linear: weights, biases and moments must be contiguous.")


def constants(tiles: Tiles, normalize: bool, activation: str, residual: bool, moments: bool) -> dict[str, object]:
    """Returns the compile-time constants of a kernel."""
    return {
        "NORMALIZE": normalize,
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "MOMENTS": moments,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.channels,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
