"""Time per layer: in itself, and with everything inside it; forward, and for training backward too.

On a GPU a pair of CUDA events stands around each layer, read after the step: what is measured is the time
between them on the device's own clock, waits for Python included. On a CPU the clock is `perf_counter`, and
the hooks' own time is charged to nobody. Steps with and without hooks take turns, so that the cost of
looking is known and printed.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from redline.ladder.profile.flops import count_flops
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import BACKWARD, FORWARD, LOSS, OPTIMIZER, OUTSIDE, WATCHING, Place, Tracker
from redline.ladder.statistics import median

REPEATS = 7


@dataclass(frozen=True)
class LayerTime:
    """One layer; `self_s` without, `total_s` with the layers inside it. FLOPs are its own, of both passes."""

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
    """All layers of one class together."""

    type: str
    layers: int
    self_s: float
    flops: float


@dataclass(frozen=True)
class LayerTimes:
    """Layers in the model's order, then what is no layer: loss, optimizer, and what ran outside."""

    layers: tuple[LayerTime, ...]
    # Medians of whole steps, without and with the hooks.
    step_s: float
    watched_step_s: float
    repeats: int
    flops: float
    precision: str
    # The rate that this precision reaches on this machine; 0 when it was never measured.
    ceiling_flops_per_s: float

    @property
    def self_sum_s(self) -> float:
        return sum(layer.self_s for layer in self.layers)

    @property
    def overhead(self) -> float:
        """How much longer a step takes while it is watched: 0.1 is a tenth."""
        return self.watched_step_s / self.step_s - 1

    def share(self, seconds: float) -> float:
        """Of the time that all layers took together, so that shares add up to one."""
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
    """Times every layer that runs, where layers can be told apart (`subject.sealed` is empty)."""
    plain, watched, steps = [], [], []
    with Tracker(subject):
        subject.step()  # the first step under hooks is slower than the rest
    for _ in range(repeats):
        plain.append(subject.timed_step())
        seconds, times = _watched_step(subject)
        watched.append(seconds)
        steps.append(times)
    flops = count_flops(subject)
    ceilings = subject.machine.ceilings
    precision = subject.job.precision
    return LayerTimes(
        layers=_rows(subject, steps, watched, flops.by_layer),
        step_s=median(plain),
        watched_step_s=median(watched),
        repeats=repeats,
        flops=flops.total,
        precision=precision,
        ceiling_flops_per_s=ceilings.flops_per_s(precision) if ceilings is not None else 0.0,
    )


@dataclass
class _Span:
    """One time that a layer ran; `outer` marks include the hooks, so that they are charged to nobody."""

    place: Place
    outer_start: Any
    start: Any
    end: Any = None
    outer_end: Any = None
    parent: "_Span | None" = None
    inside_s: float = 0.0


class _Clock:
    """Marks that cost little now and turn into seconds later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.is_cuda else end - start


@dataclass
class _StepTimes:
    """Of one step, by (layer, phase): seconds in itself, seconds in total, and calls."""

    own: dict[tuple[str, str], float]
    total: dict[tuple[str, str], float]
    calls: dict[str, int]
    # Spent in hooks.
    watching_s: float = 0.0


def _watched_step(subject: Subject) -> tuple[float, _StepTimes]:
    clock = _Clock(subject.device)
    open_spans: list[_Span] = []
    spans: list[_Span] = []

    def enter(place: Place) -> None:
        outer = clock.mark()
        span = _Span(place, outer, outer, parent=open_spans[-1] if open_spans else None)
        open_spans.append(span)
        spans.append(span)
        if not clock.is_cuda:
            span.start = clock.mark()

    def leave(place: Place) -> None:
        end = clock.mark()
        span = open_spans.pop()
        span.end = span.outer_end = end
        if not clock.is_cuda:
            span.outer_end = clock.mark()

    with Tracker(subject, enter, leave):
        seconds = subject.timed_step()
    return seconds, _sum_up(spans, clock.seconds)


def _sum_up(spans: list[_Span], seconds: Callable[[Any, Any], float]) -> _StepTimes:
    times = _StepTimes(defaultdict(float), defaultdict(float), defaultdict(int))
    for span in spans:
        if span.parent is not None:
            span.parent.inside_s += seconds(span.outer_start, span.outer_end)
    for span in spans:
        # Two clocks of the device can disagree by less than their resolution.
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
        # Python between the layers, zeroing gradients, copies; on a GPU what the events could not see.
        step.own[OUTSIDE, FORWARD] += max(seconds - step.watching_s - sum(step.own.values()), 0.0)
        step.total[OUTSIDE, FORWARD] = step.own[OUTSIDE, FORWARD]
    ran = {name for step in steps for name, _ in step.total}
    kinds = {name: type(module).__name__ for name, module in subject.layers.items()}
    rows = []
    for name in [*subject.layers, LOSS, OPTIMIZER, OUTSIDE]:
        if name not in ran:
            continue

        def middle(which: str, phase: str, name: str = name) -> float:
            return median([getattr(step, which).get((name, phase), 0.0) for step in steps])

        rows.append(
            LayerTime(
                name=name,
                type=kinds.get(name, name),
                calls=steps[-1].calls.get(name, 0),
                forward_self_s=middle("own", FORWARD),
                forward_s=middle("total", FORWARD),
                backward_self_s=middle("own", BACKWARD),
                backward_s=middle("total", BACKWARD),
                flops=flops.get(name, 0.0),
            )
        )
    return tuple(rows)
