"""Attention that a model looks up by a name: transformers' models write it out ("eager") or fuse it ("sdpa").

It lies behind a table of functions, with tuples and keywords that no trace gets through. So the model's own switch is
turned, and held to the proof that a rewriting is held to: the same outputs, or it is turned back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.ladder.gate import tensors_of
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.rewrites.attention import unnoticed
from redline.ladder.workload import call

_PLAIN, _FUSED = "eager", "sdpa"
# Of a whole model in fp32, whose layers pass their rounding on.
TOLERANCE = 1e-4


@dataclass
class Switching:
    """Names of the modules that were switched, and what was tried in vain, with reasons."""

    done: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    _undos: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        for turn_back in reversed(self._undos):
            turn_back()


def switch_to_fused(job: Job) -> Switching:
    """Turns the switch of every model inside that has one and stands at plain attention."""
    result = Switching()
    for name, module in _owners(job.model):
        called = name or "the model itself"
        expected = _outputs(job)
        try:
            module.set_attn_implementation(_FUSED)
        except (ValueError, ImportError) as error:
            result.left.append((called, str(error).splitlines()[0].rstrip(".")))
            continue

        def turn_back(module: Any = module) -> None:
            module.set_attn_implementation(_PLAIN)

        error = relative_error(expected, _outputs(job))
        if module.config._attn_implementation == _FUSED and error <= TOLERANCE:
            result.done.append(called)
            result._undos.append(turn_back)
        else:
            turn_back()
            result.left.append((called, f"equality is not proven: relative error {error:.1e}"))
    return result


def _owners(model: nn.Module) -> list[tuple[str, Any]]:
    """The outermost modules with a switch; those inside of them turn with it."""
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{owner}.") or not owner for owner, _ in found)
        config = getattr(module, "config", None)
        has_switch = callable(getattr(module, "set_attn_implementation", None))
        if has_switch and not inside and getattr(config, "_attn_implementation", None) == _PLAIN:
            found.append((name, module))
    return found


def _outputs(job: Job) -> list[torch.Tensor]:
    """Of the first sample, without dropout, by kernels that round alike."""
    was_training = job.model.training
    job.model.eval()
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), unnoticed(job.model):
            return [
                tensor.float() for tensor in tensors_of(call(job.model, job.samples[0])) if tensor.is_floating_point()
            ]
    finally:
        job.model.train(was_training)
