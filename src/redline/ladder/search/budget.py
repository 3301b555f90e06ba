"""The time left in a climb, and the time limit of each trial."""

import time
from collections.abc import Iterable

from redline.ladder.measurement import Measurement
from redline.ladder.plan import Plan
from redline.ladder.rung import Rung

# The share of the remaining time that one trial may take. A search for kernels gets a smaller share, because it can
# take many minutes.
_SHARE, _SHARE_OF_A_SEARCH = 0.35, 0.15
_LEAST_S = 5.0
# A set-up of a known duration gets this many times that duration, so that it is not stopped shortly before its end.
_PATIENCE = 2.0
# After a search for kernels hit its time limit, another one starts only with at least this share of that limit: it can
# be faster (in half precision, for example), but hardly by more than a factor of two.
_WORTH_ANOTHER_SEARCH = 0.5


class Budget:
    """Time limits of trials. Without `total_s` the climb has no limit, and each trial is limited by `trial_s` alone."""

    def __init__(self, total_s: float | None, trial_s: float, started_s: float | None = None) -> None:
        self._total_s, self._trial_s = total_s, trial_s
        self._started_s = time.monotonic() if started_s is None else started_s
        # The longest time limit that a search for kernels has exceeded.
        self.search_s = 0.0

    @property
    def left_s(self) -> float:
        if self._total_s is None:
            return float("inf")
        return self._total_s - (time.monotonic() - self._started_s)

    @property
    def is_spent(self) -> bool:
        return self.left_s < self._reserved_s

    @property
    def _reserved_s(self) -> float:
        """Time for the final race: a fifth of the budget, at most a minute."""
        return min(60.0, 0.2 * (self._total_s or 0.0))

    def for_trial_s(self, added: Plan | Rung, known_s: float = 0.0) -> float:
        """Returns the time limit of a trial: a share of the remaining time, or more if its set-up takes `known_s`."""
        share = _SHARE_OF_A_SEARCH if searches_kernels(added) else _SHARE
        fair_s = max(share * self.left_s, min(_PATIENCE * known_s, self.left_s - self._reserved_s))
        return max(_LEAST_S, min(self._trial_s, fair_s))

    def is_worth_a_search(self, limit_s: float) -> bool:
        return limit_s >= _WORTH_ANOTHER_SEARCH * self.search_s


def searches_kernels(added: Plan | Rung) -> bool:
    """Returns whether a compiler times many kernels for each operation."""
    return "max-autotune" in str(added)


def known_compile_s(plan: Plan, rows: Iterable[Measurement]) -> float:
    """Returns the longest set-up so far of plans that compile without a search for kernels; 0 if `plan` does not."""
    if not _only_compiles(plan):
        return 0.0
    compiled = (row for row in rows if row.setup_s and _only_compiles(Plan.parse(row.plan)))
    return max((sum(row.setup_s.values()) for row in compiled), default=0.0)


def _only_compiles(plan: Plan) -> bool:
    """Returns whether the plan compiles without a search for kernels, whose duration is hard to predict."""
    return "compile" in plan and not any(rung.autotunes for rung in plan.rungs)
