"""A gate: a metric with a limit. It says whether an output is still good, and NaN never passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redline.errors import GateError
from redline.ladder.metrics import METRICS


@dataclass(frozen=True)
class Score:
    """What one gate saw."""

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
    """`Gate("relative_error", 0.02)`, or `Gate("mine", 0.9, function=f, better="higher")` with a function of your own.

    Your function takes `(reference, output)`, both lists of the tensors that the model returned, and gives a number.
    """

    metric: str
    limit: float
    function: Callable[[list[Tensor], list[Tensor]], float] | None = None
    better: str = ""

    def __post_init__(self) -> None:
        if self.function is None and self.metric not in METRICS:
            raise GateError(f"unknown metric {self.metric!r}: choose one of {', '.join(METRICS)}, or pass function=.")
        if self.function is not None and self.better not in ("lower", "higher"):
            raise GateError(f"gate {self.metric!r}: say better='lower' or better='higher'.")
        if self.function is None and self.better:
            raise GateError(f"gate {self.metric!r}: better= belongs to a function of your own.")
        if not math.isfinite(self.limit):
            raise GateError(f"gate {self.metric!r}: the limit must be a finite number, not {self.limit}.")

    @property
    def direction(self) -> str:
        return self.better or METRICS[self.metric].better

    def judge(self, reference: Any, output: Any) -> Score:
        """Scores one output against its reference."""
        expected, seen = tensors_of(reference), tensors_of(output)
        problem = mismatch(expected, seen)
        if problem:
            raise GateError(problem)
        seen = [s.to(e.device) for e, s in zip(expected, seen, strict=True)]
        value = float((self.function or METRICS[self.metric].measure)(expected, seen))
        within = value <= self.limit if self.direction == "lower" else value >= self.limit
        return Score(self.metric, value, self.limit, self.direction, bool(within) and math.isfinite(value))


def tensors_of(output: Any) -> list[Tensor]:
    """Every tensor in an output, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def mismatch(reference: Sequence[Tensor], output: Sequence[Tensor]) -> str:
    """A sentence when two outputs do not even have the same form."""
    if not reference:
        return "the workload returned no tensor, so there is nothing to judge."
    if len(reference) != len(output):
        return f"the output has {len(output)} tensors where the reference has {len(reference)}."
    for expected, seen in zip(reference, output, strict=True):
        if expected.shape != seen.shape:
            return f"an output has shape {tuple(seen.shape)} where the reference has {tuple(expected.shape)}."
        if expected.is_floating_point() != seen.is_floating_point():
            return f"an output is {seen.dtype} where the reference is {expected.dtype}."
    return ""


def all_finite(output: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors_of(output) if t.is_floating_point())


def worst(scores: Sequence[Score]) -> Score:
    """The score of one gate over several batches: the batch that fared worst, and NaN is worse than anything."""
    nans = [s for s in scores if math.isnan(s.value)]
    if nans:
        return nans[0]
    return (max if scores[0].better == "lower" else min)(scores, key=lambda s: s.value)


INFERENCE_GATES = (Gate("relative_error", 0.02), Gate("cosine", 0.999))
TRAINING_GATES = (Gate("loss_difference", 0.01), Gate("gradient_difference", 0.05))
