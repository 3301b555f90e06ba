"""Determines how many layers can be quantized while all gates pass, in order of measured sensitivity."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from redline.errors import RungError
from redline.ladder.gate import Gate, Score, all_finite, gates_for, tensors_of, worst
from redline.ladder.job import Job
from redline.ladder.metrics import METRICS
from redline.ladder.rewrites.calibrate import outputs_on_samples

Quantize = Callable[[str, nn.Linear], None]
# The share of each gate's limit that stays unused, because inputs other than the samples may have larger errors.
_MARGIN = 0.1


def passing_layers(rung: str, job: Job, layers: Mapping[str, nn.Linear], quantize: Quantize) -> list[str]:
    """Returns the names of the least sensitive layers that can be quantized together while all gates pass."""
    order = least_sensitive_first(job, layers, quantize)
    count = longest_passing(job, order, layers, quantize)
    if not count:
        raise RungError(
            f"{rung}: quantizing only {order[0]!r}, the least sensitive of {len(order)} layers, fails a gate or uses "
            f"more than {1 - _MARGIN:.0%} of its limit."
        )
    return order[:count]


@contextmanager
def quantized(layers: Mapping[str, nn.Linear], quantize: Quantize) -> Iterator[None]:
    """Quantizes the layers inside the context and restores their weights on exit."""
    originals = {name: layer.weight for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            quantize(name, layer)
        yield
    finally:
        for name, layer in layers.items():
            layer.weight = originals[name]
            layer.__dict__.pop("extra_repr", None)  # torchao has set this attribute on the layer


def least_sensitive_first(job: Job, layers: Mapping[str, nn.Linear], quantize: Quantize) -> list[str]:
    """Returns the names of the layers, sorted by the change of the output when only that layer is quantized."""
    reference = outputs_on_samples(job)
    harm = {}
    for name, layer in layers.items():
        with quantized({name: layer}, quantize):
            harm[name] = _distance(reference, outputs_on_samples(job), job.gates)
    return sorted(layers, key=lambda name: harm[name])


def longest_passing(job: Job, order: Sequence[str], layers: Mapping[str, nn.Linear], quantize: Quantize) -> int:
    """Returns how many layers, taken in order, can be quantized together with all gates passing.

    Compares with the outputs of the user's original model, so the errors of earlier rungs are included, and reserves a
    margin of each limit for other inputs. Uses bisection, which assumes that quantizing more layers does not improve
    the output; the returned count itself was tested.
    """
    reference = job.expected or outputs_on_samples(job)
    gates = [_with_margin(gate, reference) for gate in gates_for(job.gates, reference)]

    def passes(count: int) -> bool:
        with quantized({name: layers[name] for name in order[:count]}, quantize):
            outputs = outputs_on_samples(job)
        return all(map(all_finite, outputs)) and all(_worst(gate, reference, outputs).passed for gate in gates)

    if passes(len(order)):
        return len(order)
    good, bad = 0, len(order)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good


def _with_margin(gate: Gate, reference: Sequence[Any]) -> Gate:
    """Returns the gate with its limit moved by the margin toward the score of a perfect output."""
    perfect = _worst(gate, reference, reference).value
    if math.isnan(perfect):
        return gate
    away = perfect - gate.limit if math.isfinite(perfect) else math.copysign(gate.limit, perfect)
    return replace(gate, limit=gate.limit + _MARGIN * away)


def _worst(gate: Gate, reference: Sequence[Any], outputs: Sequence[Any]) -> Score:
    return worst([gate.judge(r, o) for r, o in zip(reference, outputs, strict=True)])


def _distance(reference: Sequence[Any], outputs: Sequence[Any], gates: Sequence[Gate]) -> float:
    """Returns how far the outputs are from the reference; smaller is better.

    Float outputs are compared by relative error, because gates such as top-1 agreement are too coarse to rank layers.
    Other outputs are compared by the worst score of the gates.
    """
    if not all(map(all_finite, outputs)):
        return float("inf")
    pairs = [(tensors_of(r), tensors_of(o)) for r, o in zip(reference, outputs, strict=True)]
    if all(any(t.is_floating_point() for t in r) for r, _ in pairs):
        return max(METRICS["relative_error"].measure(r, o) for r, o in pairs)
    scores = [_worst(gate, reference, outputs) for gate in gates_for(gates, reference)]
    return max(score.value if score.better == "lower" else -score.value for score in scores)
