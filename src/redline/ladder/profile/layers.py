"""Times each layer, with and without its inner layers, in the forward pass and (for training) the backward pass.

On a GPU a pair of CUDA events is recorded around each layer and read after the step, so the time includes waiting for
Python. On a CPU the clock is `perf_counter`, and the time spent in hooks is not attributed to any layer. Steps with and
without hooks alternate, so that the overhead of the hooks can be reported.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from redline.ladder.measuring.flops import counting_flops
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import BACKWARD, FORWARD, LOSS, OPTIMIZER, OUTSIDE, WATCHING, Place, Tracker
from redline.ladder.statistics import median
from redline.notation import format_seconds

REPEATS = 7


@dataclass(frozen=True)
class LayerTime:
    """The times of one layer; `total_s` includes the layers inside it, `self_s` and `flops` exclude them."""

    name: str
    type: str
    calls: int
    forward_self_s: float
    forward_s: float
    backward_self_s: float
    backward_s: float
    flops: float

    @property
    def self_s(self) -> float:
        return self.forward_self_s + self.backward_self_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.self_s if self.flops and self.self_s > 0 else 0.0


@dataclass(frozen=True)
class TypeTime:
    """The sum over all layers of one class."""

    type: str
    layers: int
    self_s: float
    flops: float


@dataclass(frozen=True)
class LayerTimes:
    """The layers in the order of the model, followed by the loss, the optimizer and the time outside of layers."""

    layers: tuple[LayerTime, ...]
    # The median seconds of a whole step, without and with the hooks.
    step_s: float
    watched_step_s: float
    repeats: int
    flops: float
    precision: str
    # The measured peak rate of this machine in this precision; 0 if unknown.
    ceiling_flops_per_s: float

    @property
    def self_sum_s(self) -> float:
        return sum(layer.self_s for layer in self.layers)

    @property
    def overhead(self) -> float:
        """The relative slowdown of a step by the hooks: 0.1 is 10%."""
        return self.watched_step_s / self.step_s - 1

    @property
    def measuring_cost(self) -> str:
        """A sentence that states the overhead of the measurement, for the terminal and the page."""
        return (
            f"The layers add up to {format_seconds(self.self_sum_s)}; a step takes {format_seconds(self.step_s)} "
            f"without hooks and {format_seconds(self.watched_step_s)} with hooks ({self.overhead:+.0%}), medians of "
            f"{self.repeats} steps."
        )

    def share(self, seconds: float) -> float:
        """Returns the share of the time of all layers, so that shares add up to one."""
        total = self.self_sum_s
        return seconds / total if total > 0 else 0.0

    def of_ceiling(self, layer: LayerTime) -> float:
        return layer.flops_per_s / self.ceiling_flops_per_s if self.ceiling_flops_per_s else 0.0

    def largest(self, count: int) -> tuple[LayerTime, ...]:
        return tuple(sorted(self.layers, key=lambda layer: -layer.self_s)[:count])

    def by_type(self) -> tuple[TypeTime, ...]:
        groups: dict[str, list[LayerTime]] = defaultdict(list)
        for layer in self.layers:
            groups[layer.type].append(layer)
        kinds = [
            TypeTime(kind, len(group), sum(x.self_s for x in group), sum(x.flops for x in group))
            for kind, group in groups.items()
        ]
        return tuple(sorted(kinds, key=lambda kind: -kind.self_s))


def time_layers(subject: Subject, repeats: int = REPEATS) -> LayerTimes:
    """Times every layer that runs; `subject.sealed` must be empty."""
    plain, watched, steps = [], [], []
    with Tracker(subject):
        subject.step()  # the first step with hooks is slower
    for _ in range(repeats):
        plain.append(subject.timed_step())
        seconds, times = _watched_step(subject)
        watched.append(seconds)
        steps.append(times)
    flops, flops_by_layer = _count_flops(subject)
    ceilings, precision = subject.machine.ceilings, subject.job.precision
    return LayerTimes(
        layers=_rows(subject, steps, watched, flops_by_layer),
        step_s=median(plain),
        watched_step_s=median(watched),
        repeats=repeats,
        flops=flops,
        precision=precision,
        ceiling_flops_per_s=ceilings.flops_per_s(precision) if ceilings is not None else 0.0,
    )


def _count_flops(subject: Subject) -> tuple[float, dict[str, float]]:
    """Counts the matrix products and convolutions of one step, in total and by layer; a multiply-add counts as two."""
    # The counter's own tracker of modules is wrong in backward passes.
    with counting_flops(Tracker(subject)) as counter:
        subject.step()
    counts = {name: float(sum(kinds.values())) for name, kinds in counter.get_flop_counts().items()}
    by_layer = {name.removeprefix("layer:"): flops for name, flops in counts.items() if name != "Global"}
    return float(counter.get_total_flops()), by_layer


@dataclass
class _Span:
    """One run of a layer; the `outer` marks include the hooks. A mark is a CUDA event, or a time on a CPU."""

    place: Place
    parent: "_Span | None"
    outer_start: Any
    start: Any
    end: Any = None
    outer_end: Any = None
    inside_s: float = 0.0


@dataclass
class _StepTimes:
    """The times of one step by (layer, phase): seconds without and with inner layers, and the number of calls."""

    own: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    total: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    # Time spent in hooks.
    watching_s: float = 0.0


def _watched_step(subject: Subject) -> tuple[float, _StepTimes]:
    is_cuda = subject.device.type == "cuda"
    open_spans: list[_Span] = []
    spans: list[_Span] = []

    def mark() -> Any:
        if not is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(subject.device))
        return event

    def enter(place: Place) -> None:
        outer = mark()
        span = _Span(place, open_spans[-1] if open_spans else None, outer, outer)
        open_spans.append(span)
        spans.append(span)
        if not is_cuda:
            span.start = mark()

    def leave(place: Place) -> None:
        end = mark()
        span = open_spans.pop()
        span.end = span.outer_end = end
        if not is_cuda:
            span.outer_end = mark()

    with Tracker(subject, enter, leave):
        step_s = subject.timed_step()
    return step_s, _sum_up(spans, lambda start, end: start.elapsed_time(end) / 1e3 if is_cuda else end - start)


def _sum_up(spans: list[_Span], seconds: Callable[[Any, Any], float]) -> _StepTimes:
    times = _StepTimes()
    for span in spans:
        if span.parent is not None:
            span.parent.inside_s += seconds(span.outer_start, span.outer_end)
    for span in spans:
        # Differences of event times can be slightly negative because of their resolution.
        own = max(seconds(span.start, span.end) - span.inside_s, 0.0)
        phase = span.place.phase
        times.watching_s += seconds(span.outer_start, span.start) + seconds(span.end, span.outer_end)
        if span.place.layer == WATCHING:
            times.watching_s += own
            continue
        times.own[span.place.layer, phase] += own
        for name in set(span.place.path) or {OUTSIDE}:
            times.total[name, phase] += own
        if phase == FORWARD:
            times.calls[span.place.layer] += 1
    return times


def _rows(
    subject: Subject, steps: list[_StepTimes], watched: list[float], flops: Mapping[str, float]
) -> tuple[LayerTime, ...]:
    for step, seconds in zip(steps, watched, strict=True):
        # The remaining time: Python code between layers, zeroing gradients, copies, and on a GPU time not covered by
        # events.
        step.own[OUTSIDE, FORWARD] += max(seconds - step.watching_s - sum(step.own.values()), 0.0)
        step.total[OUTSIDE, FORWARD] = step.own[OUTSIDE, FORWARD]
    ran = {name for step in steps for name, _ in step.total}
    kinds = {name: type(module).__name__ for name, module in subject.layers.items()}

    def middle(times: str, name: str, phase: str) -> float:
        return median([getattr(step, times).get((name, phase), 0.0) for step in steps])

    return tuple(
        LayerTime(
            name=name,
            type=kinds.get(name, name),
            calls=steps[-1].calls.get(name, 0),
            forward_self_s=middle("own", name, FORWARD),
            forward_s=middle("total", name, FORWARD),
            backward_self_s=middle("own", name, BACKWARD),
            backward_s=middle("total", name, BACKWARD),
            flops=flops.get(name, 0.0),
        )
        for name in [*subject.layers, LOSS, OPTIMIZER, OUTSIDE]
        if name in ran
    )
