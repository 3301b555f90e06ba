"""Chooses the implementation of an op: Triton kernels where they are supported, otherwise plain PyTorch."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch

from redline.errors import MachineError, ModelError

IMPLEMENTATIONS = ("auto", "reference", "triton")
_TRITON_INSTALLED = find_spec("triton") is not None


def choose(
    op: str,
    requested: str,
    device: torch.device,
    why_not: Callable[[], str],
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    fallback: str = "reference",
) -> str:
    """Returns the implementation to run.

    `auto` takes Triton on a CUDA device, and `fallback` elsewhere. If the kernels do not support an input on a CUDA
    device, `auto` warns and takes `fallback`, and `triton` raises a MachineError. `why_not` returns the reason, or an
    empty string; it is called only if Triton is installed, so it may import Triton.
    """
    if requested not in implementations:
        raise ModelError(f"{op}: unknown implementation {requested!r} (supported: {', '.join(implementations)}).")
    if requested not in ("auto", "triton"):
        return requested
    if requested == "auto" and device.type != "cuda":
        return fallback
    reason = why_not() if _TRITON_INSTALLED else "Triton is not installed (pip install triton)"
    if not reason:
        return "triton"
    if requested == "triton":
        raise MachineError(f"{op}: the Triton kernels cannot run: {reason}.")
    warn_once_traced(f"{op}: falling back to plain PyTorch, which is slower: {reason}.")
    return fallback


def warn_once_traced(message: str) -> bool:
    """Warns on behalf of the op's caller. Under torch.compile the warning is issued once, while tracing."""
    warnings.warn(message, stacklevel=4)
    return True


# With this attribute, Dynamo calls the function while it traces and leaves it out of the graph.
# torch.compiler.assume_constant_result sets the same attribute, but imports the whole compiler.
vars(warn_once_traced)["_dynamo_marked_constant"] = True
