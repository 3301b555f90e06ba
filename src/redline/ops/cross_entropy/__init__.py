"""Cross-entropy with label smoothing and z-loss.

N: rows, V: classes.
"""

import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_integers, check_same_device
from redline.ops.cross_entropy import reference
from redline.ops.dispatch import run

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
    """Returns the cross-entropy, with z_loss · logsumexp(logits)² added per row, in fp32 (fp64 for fp64 logits).

    The other options are those of PyTorch. The mean is over the rows whose target is not `ignore_index`; if all are
    ignored, the loss and the gradients are 0, not NaN. On a CPU a target that is not a class raises a ModelError. On a
    GPU the check would synchronize, so the row's loss and gradients are NaN; no memory outside the logits is read.
    """
    if logits_NV.ndim != 2 or not logits_NV.is_floating_point() or not logits_NV.shape[1]:
        given = f"{tuple(logits_NV.shape)} {logits_NV.dtype}"
        raise ModelError(f"cross_entropy: logits_NV must be floating-point logits (rows, classes), not {given}.")
    check_options("cross_entropy", label_smoothing, z_loss, reduction)
    check_targets("cross_entropy", logits_NV, target_N, logits_NV.shape[1], ignore_index)
    arguments = (logits_NV, target_N, ignore_index, label_smoothing, z_loss, reduction)
    return run("cross_entropy", implementation, (logits_NV,), reference.cross_entropy, *arguments)


def check_options(op: str, label_smoothing: float, z_loss: float, reduction: str) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ModelError(f"{op}: label_smoothing must be between 0 and 1, not {label_smoothing}.")
    if not 0.0 <= z_loss < float("inf"):
        raise ModelError(f"{op}: z_loss must be finite and at least 0, not {z_loss}.")
    if reduction not in REDUCTIONS:
        raise ModelError(f"{op}: unknown reduction {reduction!r} (supported: {', '.join(REDUCTIONS)}).")


def check_targets(op: str, rows: Tensor, target_N: Tensor, classes: int, ignore_index: int) -> None:
    """Checks shape, dtype and device of the targets and, on a CPU, that each is a class or ignored."""
    check_integers(op, "target_N", target_N, rows.shape[:1])
    check_same_device(op, rows=rows, target_N=target_N)
    # Skips the check of the values on a GPU, where it would synchronize, and while a compiler traces, because tensors
    # have no values then.
    if target_N.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = target_N[((target_N < 0) | (target_N >= classes)) & (target_N != ignore_index)]
    if len(wrong):
        raise ModelError(
            f"{op}: target {int(wrong[0])} is not one of {classes} classes, and not ignore_index ({ignore_index})."
        )
