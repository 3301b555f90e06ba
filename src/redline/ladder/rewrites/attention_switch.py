"""Switches models of transformers from hand-written ("eager") to fused ("sdpa") attention.

These models look up their attention function by name, which cannot be traced. The switch uses
`set_attn_implementation` and is reverted if the outputs of the model change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.errors import first_line
from redline.ladder.gate import tensors_of
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.rewrites.sample_run import state_preserved
from redline.ladder.workload import call

_PLAIN, _FUSED = "eager", "sdpa"
# The limit of the relative error, larger than for a single module, because rounding errors accumulate over layers.
TOLERANCE = 1e-4


@dataclass
class Rewriting:
    """Lists the rewritten modules, and the unchanged modules with the reason for each."""

    done: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undos: list[Callable[[], None]] = field(default_factory=list)

    def __add__(self, other: "Rewriting") -> "Rewriting":
        return Rewriting(self.done + other.done, self.left + other.left, self.undos + other.undos)

    def undo(self) -> None:
        for undo in reversed(self.undos):
            undo()

    @property
    def examples(self) -> str:
        """The names of the first rewritten modules, and the number of the others."""
        return ", ".join(self.done[:4]) + (f" and {len(self.done) - 4} more" if len(self.done) > 4 else "")

    @property
    def reasons(self) -> str:
        return ", ".join(f"{name} ({reason})" for name, reason in self.left)


def switch_to_fused(job: Job) -> Rewriting:
    """Switches every submodel that uses eager attention."""
    result = Rewriting()
    for name, module in _owners(job.model):
        label = name or "the model itself"
        expected = _outputs(job)
        try:
            module.set_attn_implementation(_FUSED)
        except (ValueError, ImportError) as error:
            result.left.append((label, first_line(error)))
            continue
        error = relative_error(expected, _outputs(job))
        if module.config._attn_implementation == _FUSED and error <= TOLERANCE:
            result.done.append(label)
            result.undos.append(partial(module.set_attn_implementation, _PLAIN))
        else:
            module.set_attn_implementation(_PLAIN)
            result.left.append((label, f"equality is not proven: relative error {error:.1e}"))
    return result


def _owners(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the outermost modules that can be switched; modules inside them switch with them."""
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{owner}.") or not owner for owner, _ in found)
        config = getattr(module, "config", None)
        has_switch = callable(getattr(module, "set_attn_implementation", None))
        if has_switch and not inside and getattr(config, "_attn_implementation", None) == _PLAIN:
            found.append((name, module))
    return found


def _outputs(job: Job) -> list[torch.Tensor]:
    """Returns the outputs for the first sample, without dropout and with the math kernel."""
    was_training = job.model.training
    job.model.eval()
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), state_preserved(job.model):
            return [t.float() for t in tensors_of(call(job.model, job.samples[0])) if t.is_floating_point()]
    finally:
        job.model.train(was_training)
