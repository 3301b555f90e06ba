"""Which implementation of an operator runs: the Triton kernels where they can, else plain PyTorch, never in silence."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch

from redline.errors import MachineError, ModelError

IMPLEMENTATIONS = ("auto", "reference", "triton")
_TRITON_INSTALLED = find_spec("triton") is not None


def choose(
    op: str,
    asked: str,
    device: torch.device,
    why_not: Callable[[], str],
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    otherwise: str = "reference",
) -> str:
    """The implementation to run; a wish that cannot be met is refused, and a GPU that takes the slow path says so.

    `why_not` says why the kernels cannot take the input, or nothing; it is asked only where Triton is installed, so
    that it may import them. `otherwise` is what `auto` takes where they cannot.
    """
    if asked not in implementations:
        raise ModelError(f"{op} has no implementation {asked!r}: it has {', '.join(implementations)}.")
    if asked not in ("auto", "triton"):
        return asked
    if asked == "auto" and device.type != "cuda":
        return otherwise
    reason = why_not() if _TRITON_INSTALLED else "it is not installed: pip install triton"
    if not reason:
        return "triton"
    if asked == "triton":
        raise MachineError(f"{op} by Triton cannot run: {reason}.")
    warn_once_traced(f"{op} runs as plain PyTorch, which is slower, because Triton cannot: {reason}.")
    return otherwise


def warn_once_traced(sentence: str) -> bool:
    """A warning in the name of whoever called the operator, under a compiler too."""
    warnings.warn(sentence, stacklevel=4)
    return True


# A compiler runs it while it traces, and leaves it out of its graph: torch.compiler.assume_constant_result does just
# this, but loads the whole compiler for it.
vars(warn_once_traced)["_dynamo_marked_constant"] = True
