"""Trials: times plans in turns, each in its own process (an arm), so that drift of the machine affects all equally."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from redline.ladder.gate import Score
from redline.ladder.measuring.worker_pool import Worker, WorkerFailed, WorkerPool
from redline.ladder.objective import WORTHWHILE, Comparison, Objective
from redline.ladder.plan import Plan
from redline.ladder.statistics import CALLS_PER_TURN, LEAST_CALLS, Interval, median, ratio_interval

JUDGE_SEEDS = (10, 11, 12)
FRESH_SEEDS = (20, 21, 22)
# In each turn of an arm, a short step is repeated for about this many seconds.
_SAMPLE_S = 0.02
# A sample of a slow step has at least this many requests per caller.
_REQUESTS_EACH = 2
# Every comparison has at least this many turns, unless they take very long.
_LEAST_TURNS = 8
# Seconds per step by shape; for p99, the seconds of each call.
Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class TrialSpec:
    """The settings that all arms share: the workload with its input shapes, the device, and the reference outputs."""

    address: str
    shapes: Mapping[str, Mapping[str, Any]]
    device: str
    references: Mapping[tuple[int, ...], str]
    objective: Objective = Objective.LATENCY
    timeout_s: float = 300.0
    # Seconds of sampling for a comparison of two arms, and the minimum and maximum number of turns.
    sampling_s: float = 6.0
    turns: tuple[int, int] = (12, 60)
    # The concurrent callers of the objective `requests`, else 0.
    callers: int = 0
    # The limits on the peak memory and on the score of the first error gate; 0 means no limit.
    max_bytes: int = 0
    max_error: float = 0.0
    # The workload's name in messages and measurements; set if the address is valid only during this run.
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.address

    @property
    def is_tail(self) -> bool:
        """Whether samples are single calls, whose 99th percentile is compared."""
        return self.objective is Objective.P99

    @property
    def least_steps(self) -> int:
        """The timed steps of each plan in a comparison, even if a step is slow."""
        if self.is_tail:
            return LEAST_CALLS
        return _LEAST_TURNS * (_REQUESTS_EACH * self.callers or 1)


@dataclass
class Arm:
    """One arm of a comparison: a plan that is set up in a worker process."""

    plan: Plan
    worker: Worker
    setup_s: Mapping[str, float]
    cached: bool
    warmups: int
    scores: tuple[Score, ...]
    proof: Mapping[str, str]
    notes: tuple[str, ...]
    precision: str
    weight_bytes: int
    least_bytes: Mapping[str, float]
    step_s: Mapping[str, float]
    device: str
    # By shape: what the first call did (see `shape_ranges`), and why it fell back.
    events: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def passed(self) -> bool:
        return all(score.passed for score in self.scores)

    @property
    def failed_score(self) -> Score | None:
        """The first score that is outside the limit of its gate, or None."""
        return next((score for score in self.scores if not score.passed), None)

    def stop(self) -> None:
        self.worker.stop()


def open_arm(
    pool: WorkerPool,
    spec: TrialSpec,
    plan: Plan,
    seeds: tuple[int, ...] = JUDGE_SEEDS,
    timeout_s: float = 0,
    started: Callable[[Worker], None] | None = None,
) -> Arm:
    """Sets up the plan in a new worker, runs the first calls, and evaluates gates and proofs. Raises WorkerFailed.

    `started` is called with the worker before the set-up.
    """
    worker = pool.start()
    try:
        if started is not None:
            started(worker)
        found = worker.ask(
            "setup",
            timeout_s or spec.timeout_s,
            address=spec.address,
            shapes=spec.shapes,
            device=spec.device,
            plan=str(plan),
            reference=spec.references[seeds],
            seeds=seeds,
            callers=spec.callers,
            max_error=spec.max_error,
        )
        return Arm(Plan.parse(found.pop("plan")), worker, device=spec.device, **found)
    except BaseException:
        worker.stop()
        raise


@contextmanager
def closed_on_failure(arm: Arm) -> Iterator[Arm]:
    """Closes the arm if its worker fails in the block."""
    try:
        yield arm
    except WorkerFailed:
        close(arm)
        raise


def measure_peak(arm: Arm, spec: TrialSpec) -> None:
    """Measures the peak memory of a step; closes the arm if that fails."""
    with closed_on_failure(arm):
        arm.peak_bytes = arm.worker.ask("peak", spec.timeout_s)


def judge_again(arm: Arm, spec: TrialSpec, seeds: tuple[int, ...]) -> None:
    """Judges a running arm on other inputs."""
    arm.scores = arm.worker.ask("judge_again", spec.timeout_s, reference=spec.references[seeds], seeds=seeds)


def take_turns(arms: Sequence[Arm], spec: TrialSpec, sampling_s: float = 0) -> list[dict[str, list[float]]]:
    """Samples every arm once per turn, in random order, until the decision is clear or the time is over.

    Returns each arm's seconds per step by shape; in every list, index i is turn i. For p99 a turn adds
    `CALLS_PER_TURN` calls instead of one number, and the time does not end the sampling before `LEAST_CALLS`.
    """
    labels = list(spec.shapes)
    steps, warm, repeats = _steps_per_sample(arms, spec)
    shuffle = random.Random(0).sample
    taken: list[dict[str, list[float]]] = [{label: [] for label in labels} for _ in arms]
    least, most = spec.turns
    allowed_s = (sampling_s or spec.sampling_s) * len(arms) / 2
    deadline = time.monotonic() + allowed_s
    for done in range(1, most + 1):
        for index in shuffle(range(len(arms)), len(arms)):
            for label, seconds in _sample(arms[index], spec, steps, warm, repeats).items():
                taken[index][label] += seconds
        # Stops before 8 turns only if the turns take very long.
        enough = 4 if time.monotonic() > deadline + allowed_s / 2 else _LEAST_TURNS
        if done >= (LEAST_CALLS // CALLS_PER_TURN if spec.is_tail else enough) and time.monotonic() > deadline:
            break
        if done >= least and done % 4 == 0 and _decided(taken, labels, spec.is_tail):
            break
        if done == 3 and len(arms) == 2 and _clearly_slower(taken, labels):
            break
    return taken


def _sample(
    arm: Arm, spec: TrialSpec, steps: dict[str, int], warm: dict[str, int], repeats: dict[str, int]
) -> dict[str, list[float]]:
    """Runs one turn of an arm."""
    if spec.is_tail:
        return arm.worker.ask("calls", spec.timeout_s, count=CALLS_PER_TURN, warm=warm)
    seconds = arm.worker.ask("sample", spec.timeout_s, steps=steps, warm=warm, repeats=repeats)
    return {label: [value] for label, value in seconds.items()}


def _steps_per_sample(arms: Sequence[Arm], spec: TrialSpec) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Returns the steps that are timed together, the untimed steps before them, and the repeats, by shape.

    All arms use the same numbers. For latency, a sample times one step at a time (several if a step is very short), and
    repeats this for about 20 ms; for throughput, it times at least 50 ms of steps together, and for requests as many
    requests as one caller makes in 100 ms, but at least two per caller.
    """
    together_s = {Objective.THROUGHPUT: 0.05, Objective.REQUESTS: 0.1}.get(spec.objective, 0.0005)
    steps, warm, repeats = {}, {}, {}
    for label in spec.shapes:
        slowest = max(arm.step_s[label] for arm in arms)
        quickest = min(arm.step_s[label] for arm in arms)
        steps[label] = max(1, _REQUESTS_EACH * spec.callers, min(1000, ceil(together_s / quickest)))
        # A long step is not slower with empty caches, so no untimed steps are needed to fill them.
        warm[label] = 0 if slowest > 1.0 or quickest > 0.1 else max(1, min(20, ceil(0.005 / quickest)))
        repeats[label] = 1 if spec.callers else max(1, min(40, int(_SAMPLE_S / (steps[label] * slowest))))
    return steps, warm, repeats


def _decided(taken: Sequence[Samples], labels: Sequence[str], tail: bool = False) -> bool:
    """Returns whether it is clear for each other arm that the last arm is faster, slower or equally fast."""
    if len(taken) == 1:
        return len(next(iter(taken[0].values()))) >= 12
    for rival in taken[:-1]:
        ratio = compare(rival, taken[-1], labels, tail)
        clear = ratio.above(WORTHWHILE) or ratio.below(1.0) or ratio.high / ratio.low < 1.005
        if not clear or ratio.high / ratio.low > 1.1:
            return False
    return True


def _clearly_slower(taken: Sequence[Samples], labels: Sequence[str]) -> bool:
    """Returns whether every sample of the last arm is much slower than all samples of the first."""
    old, new = taken[0], taken[-1]
    return all(min(new[label]) > 1.5 * max(old[label]) for label in labels)


def compare(old: Samples, new: Samples, labels: Sequence[str] | None = None, tail: bool = False) -> Interval:
    """Returns how many times faster `new` is than `old`; with `tail`, by their 99th percentiles."""
    return ratio_interval([(old[label], new[label]) for label in (labels or list(new))], tail)


def compare_arms(spec: TrialSpec, incumbent: Arm, candidate: Arm, old: Samples, new: Samples) -> Comparison:
    """Returns how the candidate differs in speed and memory; an objective decides from it which arm is better."""
    ratio = compare(old, new, tail=spec.is_tail)
    return Comparison(ratio, candidate.peak_bytes, incumbent.peak_bytes, incumbent.device, spec.max_bytes)


def close(*arms: Arm | None) -> None:
    for arm in arms:
        if arm is not None:
            arm.stop()


def geometric_mean_s(samples: Samples) -> float:
    """Returns the geometric mean of the median times over all shapes."""
    product = 1.0
    for values in samples.values():
        product *= median(values)
    return product ** (1 / len(samples))
