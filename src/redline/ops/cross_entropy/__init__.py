"""Cross-entropy with label smoothing and z-loss; `reference.py` is its specification, `triton.py` is faster."""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops import dispatch
from redline.ops.cross_entropy import reference

__all__ = ["REDUCTIONS", "check_options", "check_targets", "cross_entropy"]

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    implementation: str = "auto",
) -> Tensor:
    """As torch.nn.functional.cross_entropy, plus z_loss · lse² a row; fp32 inside and out (fp64 for fp64).

    The mean is over the rows whose target is not `ignore_index`; where all are ignored the loss is 0, not NaN, and so
    are the gradients. A target that is no class is refused on a CPU; a GPU cannot be asked without waiting for it, so
    that there the row's loss and gradients are NaN, and no memory outside the logits is read.
    """
    if logits_NV.ndim != 2 or not logits_NV.is_floating_point() or not logits_NV.shape[1]:
        shape = tuple(logits_NV.shape)
        raise ModelError(f"cross-entropy takes floating-point logits (rows, classes), not {shape}, {logits_NV.dtype}.")
    check_options(label_smoothing, z_loss, reduction)
    check_targets(logits_NV, target_N, logits_NV.shape[1], ignore_index)

    def why_not() -> str:
        from redline.ops import kernel

        return kernel.why_not(logits_NV)

    options = (ignore_index, label_smoothing, z_loss, reduction)
    if dispatch.choose("cross-entropy", implementation, logits_NV.device, why_not) == "reference":
        return reference.cross_entropy(logits_NV, target_N, *options)
    from redline.ops.cross_entropy import triton

    return triton.cross_entropy(logits_NV, target_N, *options)


def check_options(label_smoothing: float, z_loss: float, reduction: str) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ModelError(f"label smoothing is between 0 and 1, not {label_smoothing}.")
    if not 0.0 <= z_loss < float("inf"):
        raise ModelError(f"the weight of the z-loss is a finite number of at least 0, not {z_loss}.")
    if reduction not in REDUCTIONS:
        raise ModelError(f"cross-entropy has no reduction {reduction!r}: it has {', '.join(REDUCTIONS)}.")


def check_targets(rows: Tensor, target_N: Tensor, classes: int, ignore_index: int) -> None:
    """Refuses targets that do not belong to the rows, and on a CPU those that are no class."""
    if target_N.shape != rows.shape[:1] or target_N.dtype not in (torch.int64, torch.int32):
        found = f"{tuple(target_N.shape)}, {target_N.dtype}"
        raise ModelError(f"cross-entropy of {len(rows)} rows needs as many int64 or int32 targets, not {found}.")
    if target_N.device != rows.device:
        raise ModelError(f"the targets are on {target_N.device}, but the rows are on {rows.device}.")
    # What is being traced has no values to look at.
    if target_N.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = target_N[((target_N < 0) | (target_N >= classes)) & (target_N != ignore_index)]
    if len(wrong):
        raise ModelError(f"target {int(wrong[0])} is neither one of {classes} classes nor ignored ({ignore_index}).")
