"""The fused linear layer by Triton kernels, as an operator that torch.compile sees as one node."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redline.errors import ModelError
from redline.ops import kernel
from redline.ops.fused_linear.triton_kernels import STEP, described_kernel, linear_kernel

INTERPRETED = kernel.INTERPRETED


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and channels of a block, warps of a program, steps of the loop in flight."""

    rows: int
    columns: int
    channels: int
    warps: int
    stages: int


# By bytes of a number and the kind of columns: few (32), some (64) or many; or such whose moments are written, in parts
# of 128, each by one block. Those of two bytes are the fastest of many over all layers of DRCT-L on an H200
# (docs/log.md), but for "some"; those of four bytes are guesses.
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


# Of more than 64 columns in two bytes, by descriptors: 7 to 16% faster than "many" and "parts" for each layer of DRCT-L
# on an H200, the fastest of nine (docs/log.md).
DESCRIBED = Tiles(128, 128, 64, 4, 3)


def why_not(x_MK: Tensor, weight_NK: Tensor) -> str:
    """Why the kernel cannot take this, or nothing."""
    reason = kernel.why_not(x_MK)
    if reason:
        return reason
    if weight_NK.dtype != x_MK.dtype:
        return f"the weight is in {weight_NK.dtype}, and the rows are in {x_MK.dtype}"
    for name, size in (("channels", x_MK.shape[1]), ("columns", weight_NK.shape[0])):
        if size % STEP:
            return f"{size} {name} are no multiple of {STEP}"
    return ""


@torch.library.custom_op("redline::fused_linear", mutates_args=("out", "new_moments"))
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
    """The same as the reference; the product and all after it is fp32 until it is written."""
    (rows, wide), columns = x.shape, weight.shape[0]
    # What is not given is not read.
    given_sums, given_moments, old, new = (
        x if tensor is None else tensor for tensor in (weight_sums, moments, residual, new_moments)
    )
    sums = (tensor for tensor in (weight_sums, moments, new_moments) if tensor is not None)
    check_layout((x, weight, out, old), (weight, bias, *sums))
    around = (moments is not None, activation, residual is not None, new_moments is not None)
    parts = 0 if moments is None else moments.shape[0]
    sizes = (rows, wide // STEP, columns // STEP, parts)
    if columns > _SOME and x.element_size() == 2 and kernel.has_descriptors(x):
        tiles = DESCRIBED
        described = (
            TensorDescriptor.from_tensor(tensor, [height, width])
            for tensor, height, width in (
                (x, tiles.rows, tiles.channels),
                (weight, tiles.columns, tiles.channels),
                (out if residual is None else residual, tiles.rows, tiles.columns),
                (out, tiles.rows, tiles.columns),
            )
        )
        kernel.launch(
            described_kernel, (blocks(rows, columns, tiles),), bias, given_sums, given_moments, new, *described, *sizes,
            float(channels), eps, share, **constants(tiles, *around),
        )  # fmt: skip
        return
    tiles = TILES[x.element_size(), kind(columns, new_moments is not None)]
    kernel.launch(
        linear_kernel, (blocks(rows, columns, tiles),), x, weight, bias, given_sums, given_moments, old, new, out,
        *sizes, x.stride(0) // STEP, old.stride(0) // STEP, out.stride(0) // STEP, float(channels), eps, share,
        PRECISION=kernel.dot_precision(x.dtype), **constants(tiles, *around),
    )  # fmt: skip


@fused_linear.register_fake
def _(*_: object) -> None:
    return None


def kind(columns: int, with_moments: bool) -> str:
    if columns <= _SOME:
        return "few" if columns <= _FEW else "some"
    return "parts" if with_moments else "many"


def blocks(rows: int, columns: int, tiles: Tiles) -> int:
    return -(-rows // tiles.rows) * -(-columns // tiles.columns)


def check_layout(rows: Iterable[Tensor], whole: Iterable[Tensor]) -> None:
    for tensor in rows:
        if tensor.stride(1) != 1 or tensor.stride(0) % STEP or tensor.data_ptr() % (STEP * tensor.element_size()):
            raise ModelError(f"a fused linear layer reads and writes rows that begin at multiples of {STEP} numbers.")
    if not all(tensor.is_contiguous() for tensor in whole):
        raise ModelError("weights, biases and moments of a fused linear layer lie in one piece.")


def constants(tiles: Tiles, normalize: bool, activation: str, residual: bool, moments: bool) -> dict[str, object]:
    """What a kernel is compiled for."""
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
