"""A gate: a metric with a limit, which decides whether an output is still acceptable. NaN never passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redline.errors import GateError
from redline.ladder.metrics import METRICS
from redline.machine.trees import tree_leaves


@dataclass(frozen=True)
class Score:
    """The value of one gate's metric, and whether it passed."""

    metric: str
    value: float
    limit: float
    better: str
    passed: bool

    def __str__(self) -> str:
        sign = "≤" if self.better == "lower" else "≥"
        return f"{self.metric} {self.value:.3g} ({'within' if self.passed else 'outside'} {sign} {self.limit:g})"


@dataclass(frozen=True)
class Gate:
    """A limit on a metric, as in `Gate("relative_error", 0.02)` or `Gate("mine", 0.9, function=f, better="higher")`.

    A custom `function` takes `(reference, output)`, the two models' outputs as lists of tensors, and returns a number.
    """

    metric: str
    limit: float
    function: Callable[[list[Tensor], list[Tensor]], float] | None = None
    better: str = ""

    def __post_init__(self) -> None:
        if self.function is None and self.metric not in METRICS:
            raise GateError(f"unknown metric {self.metric!r}: use one of {', '.join(METRICS)}, or pass function=.")
        if self.function is not None and self.better not in ("lower", "higher"):
            raise GateError(f"gate {self.metric!r}: a custom function needs better='lower' or better='higher'.")
        if self.function is None and self.better:
            raise GateError(f"gate {self.metric!r}: better= is only for a custom function.")
        if not math.isfinite(self.limit):
            raise GateError(f"gate {self.metric!r}: the limit must be a finite number, not {self.limit}.")

    @property
    def direction(self) -> str:
        return self.better or METRICS[self.metric].better

    def judge(self, reference: Any, output: Any) -> Score:
        """Scores an output against its reference. Raises GateError if their shapes or dtypes cannot be compared."""
        expected, seen = values_of(reference), values_of(output)
        problem = mismatch(expected, seen)
        if problem:
            raise GateError(problem)
        seen = [s.to(e.device) for e, s in zip(expected, seen, strict=True)]
        value = float((self.function or METRICS[self.metric].measure)(expected, seen))
        within = value <= self.limit if self.direction == "lower" else value >= self.limit
        return Score(self.metric, value, self.limit, self.direction, bool(within) and math.isfinite(value))


def tensors_of(output: Any) -> list[Tensor]:
    """Returns all tensors of a nested output, in a fixed order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def values_of(output: Any) -> list[Tensor]:
    """Returns what gates compare: all tensors (complex ones as pairs of reals), then numbers and strings as tensors."""
    leaves = tree_leaves(output)
    values = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors_of(leaves)]
    values += [torch.tensor(leaf) for leaf in leaves if isinstance(leaf, (bool, int, float))]
    return values + [torch.tensor(list(leaf.encode()), dtype=torch.int16) for leaf in leaves if isinstance(leaf, str)]


def mismatch(reference: Sequence[Tensor], output: Sequence[Tensor]) -> str:
    """Returns a sentence on how the outputs differ in number, shape or dtype (float or not); empty if they do not."""
    if not reference:
        return "the workload returned no tensor, so no gate can be evaluated."
    if len(reference) != len(output):
        return f"the output has {len(output)} tensors, but the reference has {len(reference)}."
    for expected, seen in zip(reference, output, strict=True):
        if expected.shape != seen.shape:
            return f"an output has shape {tuple(seen.shape)}, but the reference has {tuple(expected.shape)}."
        if expected.is_floating_point() != seen.is_floating_point():
            return f"an output has dtype {seen.dtype}, but the reference has {expected.dtype}."
    return ""


def all_finite(output: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors_of(output) if t.is_floating_point())


def worst(scores: Sequence[Score]) -> Score:
    """Returns the worst of one gate's scores over several batches; NaN is the worst."""
    nans = [s for s in scores if math.isnan(s.value)]
    if nans:
        return nans[0]
    return (max if scores[0].better == "lower" else min)(scores, key=lambda s: s.value)


INFERENCE_GATES = (Gate("relative_error", 0.02), Gate("cosine", 0.999))
# The default gate for integer outputs, unless the workload has its own agreement gate.
AGREEMENT = Gate("agreement", 0.99)
TRAINING_GATES = (Gate("loss_difference", 0.01), Gate("gradient_difference", 0.05))


def gates_for(gates: Sequence[Gate], expected: Any) -> tuple[Gate, ...]:
    """Returns the gates for these outputs: integers, which most metrics ignore, are compared by `AGREEMENT`."""
    kinds = {value.is_floating_point() for value in values_of(expected) if value.numel()}
    if kinds == {False} and tuple(gates) == INFERENCE_GATES:
        return (AGREEMENT,)
    if kinds == {True, False} and not any(gate.metric == AGREEMENT.metric for gate in gates):
        return (*gates, AGREEMENT)
    return tuple(gates)
