"""The fused linear layer by a Triton kernel, as an operator that torch.compile sees as one node."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops import kernel
from redline.ops.fused_linear.triton_kernels import STEP, linear_kernel

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
    tiles = TILES[x.element_size(), kind(columns, new_moments is not None)]
    blocks = -(-x.shape[0] // tiles.rows) * -(-columns // tiles.columns)
    # What is not given is not read.
    given = [x if tensor is None else tensor for tensor in (weight_sums, moments, residual, new_moments)]
    _check_layout(x, out, given[2], weight, bias, given[1], given[3])
    kernel.launch(
        linear_kernel, (blocks,), x, weight, bias, *given, out,
        x.shape[0], x.shape[1] // STEP, columns // STEP, 0 if moments is None else moments.shape[0],
        x.stride(0) // STEP, given[2].stride(0) // STEP, out.stride(0) // STEP, float(channels), eps, share,
        **constants(x.dtype, tiles, moments is not None, activation, residual is not None, new_moments is not None),
    )  # fmt: skip


@fused_linear.register_fake
def _(*_: object) -> None:
    return None


def kind(columns: int, with_moments: bool) -> str:
    if columns <= _SOME:
        return "few" if columns <= _FEW else "some"
    return "parts" if with_moments else "many"


def _check_layout(x: Tensor, out: Tensor, residual: Tensor, *whole: Tensor) -> None:
    for rows in (x, out, residual):
        if rows.stride(1) != 1 or rows.stride(0) % STEP or rows.data_ptr() % (STEP * rows.element_size()):
            raise ModelError(f"a fused linear layer reads and writes rows that begin at multiples of {STEP} numbers.")
    if not all(tensor.is_contiguous() for tensor in whole if tensor is not x):
        raise ModelError("weights, biases and moments of a fused linear layer lie in one piece.")


def constants(
    dtype: torch.dtype, tiles: Tiles, normalize: bool, activation: str, residual: bool, moments: bool
) -> dict[str, object]:
    """What the kernel is compiled for."""
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
