"""Chooses the implementation of an op: Triton kernels where they are supported, otherwise plain PyTorch."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

from redline.errors import MachineError, ModelError

IMPLEMENTATIONS = ("auto", "reference", "triton")
_TRITON_INSTALLED = find_spec("triton") is not None

P = ParamSpec("P")
T = TypeVar("T")


def run(
    op: str,
    requested: str,
    supported: tuple[Any, ...],
    reference: Callable[P, T],
    *arguments: P.args,
    **options: P.kwargs,
) -> T:
    """Calls the reference, or the function named `op` in the `triton.py` beside it, with these arguments.

    `supported` holds the arguments of `why_not` in that `triton.py`, which returns why the kernels do not support an
    input, or an empty string. The first of these arguments is a tensor on the device of the op.
    """
    package = reference.__module__.split(".")[2]
    if select(op, requested, *supported, package=package, stacklevel=6) == "triton":
        return getattr(kernels(package), op)(*arguments, **options)
    return reference(*arguments, **options)


def select(op: str, requested: str, *supported: Any, package: str = "", stacklevel: int = 5, **options: Any) -> str:
    """Calls `choose` with the device of the first `supported` argument and with `why_not` of the op's `triton.py`."""
    package = package or op
    device = supported[0].device
    return choose(op, requested, device, lambda: kernels(package).why_not(*supported), stacklevel=stacklevel, **options)


def kernels(package: str) -> Any:
    """Returns the module `triton.py` of an op's package. Importing it imports Triton."""
    name = f"redline.ops.{package}.triton"
    _import(name)
    return sys.modules[name]


def _import(name: str) -> bool:
    import_module(name)
    return True


def choose(
    op: str,
    requested: str,
    device: torch.device,
    why_not: Callable[[], str],
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    fallback: str = "reference",
    stacklevel: int = 4,
) -> str:
    """Returns the implementation to run.

    `auto` uses Triton on a CUDA device, and `fallback` elsewhere. If the kernels do not support an input, `auto` on a
    CUDA device warns and uses `fallback`, and `triton` raises a MachineError. `why_not` returns the reason, or an empty
    string if there is none. It is called only if Triton is installed, so it may import Triton.
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
    warn_once_traced(f"{op}: falling back to plain PyTorch, which is slower: {reason}.", stacklevel)
    return fallback


def warn_once_traced(message: str, stacklevel: int = 4) -> bool:
    """Warns at the line of the op's caller. Under torch.compile the warning is issued once, while tracing."""
    warnings.warn(message, stacklevel=stacklevel)
    return True


# With this attribute, Dynamo calls a function while it traces and leaves it out of the graph.
# torch.compiler.assume_constant_result sets the same attribute, but imports the whole compiler.
for _function in (_import, warn_once_traced):
    vars(_function)["_dynamo_marked_constant"] = True
