"""Which layers can be quantized before the output is no longer good: least sensitive first, measured."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from redline.ladder.gate import Gate, all_finite, tensors_of, worst
from redline.ladder.job import Job
from redline.ladder.metrics import METRICS
from redline.ladder.rewrites.calibrate import outputs_on_samples

Quantize = Callable[[str, nn.Linear], None]
# Share of a limit that is left for inputs other than the samples.
_ROOM = 0.1


@contextmanager
def quantized(layers: Mapping[str, nn.Linear], quantize: Quantize) -> Iterator[None]:
    """Quantizes these layers for as long as the block runs; their own weights come back afterwards."""
    originals = {name: layer.weight for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            quantize(name, layer)
        yield
    finally:
        for name, layer in layers.items():
            layer.weight = originals[name]
            layer.__dict__.pop("extra_repr", None)  # torchao hangs its own on the layer


def least_sensitive_first(job: Job, layers: Mapping[str, nn.Linear], quantize: Quantize) -> list[str]:
    """The layers' names, by how far the output moves when that layer alone is quantized."""
    reference = outputs_on_samples(job)
    harm = {}
    for name, layer in layers.items():
        with quantized({name: layer}, quantize):
            harm[name] = _distance(reference, outputs_on_samples(job), job.gates)
    return sorted(layers, key=lambda name: harm[name])


def longest_passing(job: Job, order: Sequence[str], layers: Mapping[str, nn.Linear], quantize: Quantize) -> int:
    """How many layers, taken in order, can be quantized together with every gate still green.

    Judged against the user's own model, to which earlier rungs have added their errors, and with some room: other
    inputs may fare worse than the samples. By bisection, so it assumes that more quantized layers never make the output
    better; the count that it returns was itself judged, and passed.
    """
    reference = job.expected or outputs_on_samples(job)
    gates = [_with_room(gate, reference) for gate in job.gates]

    def passes(count: int) -> bool:
        with quantized({name: layers[name] for name in order[:count]}, quantize):
            return _passes(reference, outputs_on_samples(job), gates)

    if passes(len(order)):
        return len(order)
    good, bad = 0, len(order)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if passes(middle) else (good, middle)
    return good


def _with_room(gate: Gate, reference: Sequence[Any]) -> Gate:
    """The gate with a limit nearer to what the reference itself scores; where that is infinite, by the limit's size."""
    perfect = worst([gate.judge(one, one) for one in reference]).value
    if math.isnan(perfect):
        return gate
    away = perfect - gate.limit if math.isfinite(perfect) else math.copysign(gate.limit, perfect)
    return replace(gate, limit=gate.limit + _ROOM * away)


def _passes(reference: Sequence[Any], outputs: Sequence[Any], gates: Sequence[Gate]) -> bool:
    if not all(all_finite(output) for output in outputs):
        return False
    pairs = list(zip(reference, outputs, strict=True))
    return all(worst([gate.judge(r, o) for r, o in pairs]).passed for gate in gates)


def _distance(reference: Sequence[Any], outputs: Sequence[Any], gates: Sequence[Gate]) -> float:
    """The relative error where outputs are floats: a gate like top-1 agreement is too coarse to rank by."""
    if not all(all_finite(output) for output in outputs):
        return float("inf")
    pairs = [(tensors_of(r), tensors_of(o)) for r, o in zip(reference, outputs, strict=True)]
    if all(any(t.is_floating_point() for t in r) for r, _ in pairs):
        error = METRICS["relative_error"].measure
        return max(error(r, o) for r, o in pairs)
    scores = [worst([gate.judge(r, o) for r, o in zip(reference, outputs, strict=True)]) for gate in gates]
    return max(score.value if score.better == "lower" else -score.value for score in scores)
