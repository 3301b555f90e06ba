"""What is left of a climb's time, and how much of it one trial may take."""

import time
from collections.abc import Iterable

from redline.ladder.measurement import Measurement
from redline.ladder.plan import Plan
from redline.ladder.rung import Rung

# Of what is left, for one trial; less for a search over kernels, which can take many minutes.
_SHARE, _SHARE_OF_A_SEARCH = 0.35, 0.15
_LEAST_S = 5.0
# Times what a set-up of its kind has taken: to stop it just before its end wins nothing.
_PATIENCE = 2.0
# Other kernels may be found sooner, in half precision say; but hardly in less than half the time.
_WORTH_ANOTHER_SEARCH = 0.5


class Budget:
    """Without a total there is no end, and a trial has its own limit alone."""

    def __init__(self, total_s: float | None, trial_s: float, started_s: float | None = None) -> None:
        self._total_s, self._trial_s = total_s, trial_s
        self._started_s = time.monotonic() if started_s is None else started_s
        # The longest that a search over kernels was given without coming to its end.
        self.search_s = 0.0

    @property
    def left_s(self) -> float:
        if self._total_s is None:
            return float("inf")
        return self._total_s - (time.monotonic() - self._started_s)

    @property
    def is_spent(self) -> bool:
        return self.left_s < self._for_the_race_s

    @property
    def _for_the_race_s(self) -> float:
        """A fifth of the budget, a minute at most."""
        return min(60.0, 0.2 * (self._total_s or 0.0))

    def for_trial_s(self, added: Plan | Rung, known_s: float = 0.0) -> float:
        """No single trial may eat up the budget, but one that needs about `known_s` gets that if it is there."""
        share = _SHARE_OF_A_SEARCH if searches_kernels(added) else _SHARE
        fair_s = max(share * self.left_s, min(_PATIENCE * known_s, self.left_s - self._for_the_race_s))
        return max(_LEAST_S, min(self._trial_s, fair_s))

    def is_worth_a_search(self, limit_s: float) -> bool:
        return limit_s >= _WORTH_ANOTHER_SEARCH * self.search_s


def searches_kernels(added: Plan | Rung) -> bool:
    """Whether a compiler is to time many kernels for each operation."""
    return "max-autotune" in str(added)


def known_compile_s(plan: Plan, rows: Iterable[Measurement]) -> float:
    """The longest that a compiler has taken in these rows, if it has to compile for this plan too."""
    if not _only_compiles(plan):
        return 0.0
    compiled = (row for row in rows if row.setup_s and _only_compiles(Plan.parse(row.plan)))
    return max((sum(row.setup_s.values()) for row in compiled), default=0.0)


def _only_compiles(plan: Plan) -> bool:
    """And does not search for kernels, which takes as long as it likes."""
    return "compile" in plan and not any(rung.searches for rung in plan.rungs)
