"""The fused linear layer by Triton kernels, as an operator that torch.compile sees as one node."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops import kernel
from redline.ops.fused_linear.reference import MOMENT_COLUMNS
from redline.ops.fused_linear.triton_kernels import STEP, linear_kernel, rows_kernel

INTERPRETED = kernel.INTERPRETED


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and channels of a block, warps of a program, steps of the loop in flight.

    `ahead` reads residuals before the product, which takes registers.
    """

    rows: int
    columns: int
    channels: int
    warps: int
    stages: int
    ahead: bool = False


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


@dataclass(frozen=True)
class KeptRows:
    """How a program that keeps its rows works: rows, and columns of a step; warps, steps of the loop in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


KEPT_ROWS = KeptRows(128, 64, 8, 2)
# Rows of up to 192 channels are faster kept on an H200, by 5 to 15%; from 256 on blocks are, by 1 to 43% (docs/log.md).
MOST_KEPT_CHANNELS = 192
# Smaller cards have no room for rows beside the weights that pass by.
_SHARED_BYTES = 200 * 2**10


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
    columns = weight.shape[0]
    # What is not given is not read.
    given = [x if tensor is None else tensor for tensor in (weight_sums, moments, residual, new_moments)]
    sums = (tensor for tensor in (weight_sums, moments, new_moments) if tensor is not None)
    check_layout((x, out, given[2]), (weight, bias, *sums))
    around = (moments is not None, activation, residual is not None, new_moments is not None)
    if columns > _SOME and can_keep_rows(x, MOST_KEPT_CHANNELS):
        program, blocks, chosen = rows_kernel, -(-x.shape[0] // KEPT_ROWS.rows), kept_constants(x.shape[1], *around)
    else:
        tiles = TILES[x.element_size(), kind(columns, new_moments is not None)]
        blocks = -(-x.shape[0] // tiles.rows) * -(-columns // tiles.columns)
        program, chosen = linear_kernel, constants(x.dtype, tiles, *around)
    kernel.launch(
        program, (blocks,), x, weight, bias, *given, out,
        x.shape[0], x.shape[1] // STEP, columns // STEP, 0 if moments is None else moments.shape[0],
        x.stride(0) // STEP, given[2].stride(0) // STEP, out.stride(0) // STEP, float(channels), eps, share,
        **chosen,
    )  # fmt: skip


@fused_linear.register_fake
def _(*_: object) -> None:
    return None


def kind(columns: int, with_moments: bool) -> str:
    if columns <= _SOME:
        return "few" if columns <= _FEW else "some"
    return "parts" if with_moments else "many"


def can_keep_rows(x: Tensor, most_channels: int) -> bool:
    small = x.element_size() == 2 and sum(kernel.pieces(x.shape[1])) <= most_channels
    return small and kernel.shared_bytes(x) >= _SHARED_BYTES


def check_layout(rows: Iterable[Tensor], whole: Iterable[Tensor]) -> None:
    for tensor in rows:
        if tensor.stride(1) != 1 or tensor.stride(0) % STEP or tensor.data_ptr() % (STEP * tensor.element_size()):
            raise ModelError(f"a fused linear layer reads and writes rows that begin at multiples of {STEP} numbers.")
    if not all(tensor.is_contiguous() for tensor in whole):
        raise ModelError("weights, biases and moments of a fused linear layer lie in one piece.")


def constants(
    dtype: torch.dtype, tiles: Tiles, normalize: bool, activation: str, residual: bool, moments: bool
) -> dict[str, object]:
    """What the kernel of one block is compiled for."""
    return {
        "NORMALIZE": normalize,
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "MOMENTS": moments,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "BLOCK_K": tiles.channels,
        "AHEAD": tiles.ahead,
        # Three products of halves of the numbers: fp32's accuracy on tensor cores.
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def kept_constants(channels: int, normalize: bool, activation: str, residual: bool, moments: bool) -> dict[str, object]:
    """What the kernel that keeps its rows is compiled for."""
    first, rest = kernel.pieces(channels)
    return {
        "NORMALIZE": normalize,
        "ACTIVATION": activation,
        "RESIDUAL": residual,
        "MOMENTS": moments,
        "MOMENT_COLUMNS": MOMENT_COLUMNS,
        "BLOCK_M": KEPT_ROWS.rows,
        "BLOCK_N": KEPT_ROWS.columns,
        "FIRST": first,
        "REST": rest,
        "num_warps": KEPT_ROWS.warps,
        "num_stages": KEPT_ROWS.stages,
    }
