"""Estimates how long a trial takes before it starts, from the number of operations and from earlier set-ups."""

import math

from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.history import History, Record

# The time of a set-up by kind: a constant in seconds, and seconds per operation of the model. The values were measured
# on a few models and machines; the set-ups that ran on this machine correct them.
_SETUP_S = {
    "plain": (0.5, 0.001),
    "onnxruntime": (4.0, 0.04),
    "openvino": (4.0, 0.02),
    "compile": (8.0, 0.1),
    "search": (30.0, 0.6),
}
# An estimate is this many times the earlier set-up that it is based on, because set-up times vary.
_MARGIN = 1.3
# A set-up that was stopped at its time limit is assumed to need this many times the limit.
_LONGER = 1.5
# At most this many records of a kind are used, the latest ones.
_LATEST = 12


class Estimates:
    """Estimates the time of trials. `open_s` is the time without set-up: building the model and a few steps.

    `slowdown` is the factor by which other processes slow this machine down at present.
    """

    def __init__(self, history: History, digest: str, operations: int, training: bool) -> None:
        self.history, self._digest, self._training = history, digest, training
        self._operations = max(operations, 1)
        self.open_s, self.slowdown = 1.0, 1.0
        # The expected time of the next set-up of each kind, from the longest set-up of this kind in this climb.
        self._seen_s: dict[str, float] = {}

    def observe_open(self, seconds: float) -> None:
        """Keeps the shortest time seen, because the first processes also load files, and eager steps may be slower."""
        self.open_s = min(self.open_s, max(seconds, 0.2))

    def trial_s(self, plan: Plan) -> float:
        """Returns the expected seconds until the timing of the plan can start."""
        return self.open_s + self.setup_s(plan)

    def setup_s(self, plan: Plan) -> float:
        kind = kind_of(plan)
        if kind in self._seen_s:
            return self._seen_s[kind]
        same = [r for r in self.history.records if r.digest == self._digest and r.plan == str(plan) and r.finished]
        if same:
            return _MARGIN * self.slowdown * same[-1].setup_s
        alike = [r for r in self.history.records if kind_of_text(r.plan) == kind and r.setup_s > 0][-_LATEST:]
        # The geometric mean of measured time / time from the constants above; the constants count as one record.
        factors = [r.setup_s * (1 if r.finished else _LONGER) / _constant_s(kind, r.operations) for r in alike]
        factor = math.exp(sum(map(math.log, factors)) / (len(factors) + 1))
        return factor * self.slowdown * _constant_s(kind, self._operations)

    def has_seen(self, plan: Plan) -> bool:
        """Returns whether this climb has already finished or stopped a set-up of this kind."""
        return kind_of(plan) in self._seen_s

    def record(self, rung: str, plan: Plan, setup_s: float, gain: float, cached: bool = False) -> None:
        """Adds a finished set-up. If it used a compiler's cache, it is too short to predict the next of its kind."""
        if not cached:
            kind = kind_of(plan)
            self._seen_s[kind] = max(self._seen_s.get(kind, 0.0), _MARGIN * setup_s)
        self._add(rung, plan, setup_s, True, gain)

    def record_failure(self, rung: str, plan: Plan, failure: WorkerFailed, limit_s: float) -> None:
        """Adds a set-up that failed, or that was stopped after `limit_s`."""
        stopped = failure.kind == "timeout"
        if stopped:
            kind = kind_of(plan)
            self._seen_s[kind] = max(self._seen_s.get(kind, 0.0), _LONGER * limit_s)
        self._add(rung, plan, limit_s if stopped else 0.0, False, 1.0)

    def _add(self, rung: str, plan: Plan, setup_s: float, finished: bool, gain: float) -> None:
        # The history holds the time that the set-up would have taken on an idle machine.
        quiet_s = setup_s / self.slowdown
        self.history.add(
            Record(rung, str(plan), self._training, self._operations, quiet_s, finished, gain, self._digest)
        )


def kind_of(plan: Plan) -> str:
    return kind_of_text(str(plan))


def kind_of_text(plan: str) -> str:
    """Returns the slowest part of a plan's set-up: "search" (of kernels), a compiler's name, or else "plain"."""
    if "max-autotune" in plan or "tensorrt" in plan:
        return "search"
    return next((kind for kind in ("compile", "onnxruntime", "openvino") if kind in plan), "plain")


def _constant_s(kind: str, operations: int) -> float:
    constant, each = _SETUP_S[kind]
    return constant + each * operations
