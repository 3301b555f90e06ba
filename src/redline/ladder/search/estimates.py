"""Estimates how long a trial takes before it starts, from the number of operations and from earlier set-ups."""

import math

from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.plan import Plan
from redline.ladder.search.history import History, Record

# The time of a set-up by kind: a constant in seconds, and seconds per operation of the model. Measured on a few
# models and machines; the set-ups on this machine correct the values.
_SETUP_S = {"plain": (0.5, 0.001), "onnxruntime": (4.0, 0.04), "compile": (8.0, 0.1), "search": (30.0, 0.6)}
# A set-up may take this many times as long as an earlier one of the same kind.
_MARGIN = 1.3
# A set-up that was stopped at its time limit would probably have taken this many times the limit.
_LONGER = 1.5
# Only this many of the latest records of a kind are used.
_LATEST = 12


class Estimates:
    """Estimates times. `open_s` is the time of a trial without its set-up: building the model and a few steps.

    `slowdown` is how many times slower other processes make this machine now.
    """

    def __init__(self, history: History, digest: str, operations: int, training: bool) -> None:
        self.history, self._digest, self._training = history, digest, training
        self._operations = max(operations, 1)
        self.open_s, self.slowdown = 1.0, 1.0
        # The longest set-up of this climb by kind, and whether it was stopped.
        self._seen_s: dict[str, float] = {}

    def observe_open(self, seconds: float) -> None:
        """Keeps the shortest time: the first processes also load files, and the steps of eager may take much longer."""
        self.open_s = min(self.open_s, max(seconds, 0.2))

    def trial_s(self, plan: Plan) -> float:
        """Returns the seconds until the plan can be timed."""
        return self.open_s + self.setup_s(plan)

    def setup_s(self, plan: Plan) -> float:
        kind = kind_of(plan)
        if kind in self._seen_s:
            return self._seen_s[kind]
        same = [r for r in self.history.records if r.digest == self._digest and r.plan == str(plan) and r.finished]
        if same:
            return _MARGIN * self.slowdown * same[-1].setup_s
        alike = [r for r in self.history.records if kind_of_text(r.plan) == kind and r.setup_s > 0][-_LATEST:]
        # The mean factor between set-ups on this machine and the constants above, which count as one record.
        factors = [r.setup_s * (1 if r.finished else _LONGER) / _constant_s(kind, r.operations) for r in alike]
        factor = math.exp(sum(map(math.log, factors)) / (len(factors) + 1))
        return factor * self.slowdown * _constant_s(kind, self._operations)

    def has_seen(self, plan: Plan) -> bool:
        """Returns whether a set-up of this kind has ended, or was stopped, in this climb."""
        return kind_of(plan) in self._seen_s

    def record(self, rung: str, plan: Plan, setup_s: float, gain: float, cached: bool = False) -> None:
        """Adds a finished set-up. A set-up that used a compiler's cache is too short to predict others."""
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
    """Returns which part of a set-up takes most of its time: kernel search, compiler, export, or none ("plain")."""
    if "max-autotune" in plan or "tensorrt" in plan:
        return "search"
    return next((kind for kind in ("compile", "onnxruntime") if kind in plan), "plain")


def _constant_s(kind: str, operations: int) -> float:
    constant, each = _SETUP_S[kind]
    return constant + each * operations
