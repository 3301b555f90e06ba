"""The time left in a climb, and the time limit of each trial."""

import time

# A set-up is stopped after this multiple of its expected time, but not before this many seconds.
_PATIENCE = 4.0
_LEAST_S = 15.0


class Budget:
    """Time limits of trials. Without `total_s` the climb has no limit, and each trial is limited by `trial_s` alone."""

    def __init__(self, total_s: float | None, trial_s: float, started_s: float | None = None) -> None:
        self.total_s, self._trial_s = total_s, trial_s
        self._started_s = time.monotonic() if started_s is None else started_s
        # The seconds that are kept for the final race.
        self.reserved_s = 0.0

    @property
    def left_s(self) -> float:
        """The time that is left for trials."""
        if self.total_s is None:
            return float("inf")
        return self.total_s - self.spent_s - self.reserved_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def is_spent(self) -> bool:
        return self.left_s <= 0

    def limit_s(self, expected_s: float, to_the_end: bool = False) -> float:
        """Returns the time limit of a set-up that is expected to take `expected_s`.

        With `to_the_end`, the set-up may use all the time that is left. Otherwise, in a climb with a budget, the limit
        is derived from `expected_s`, so that a set-up that hangs is stopped earlier.
        """
        patience_s = max(_LEAST_S, _PATIENCE * expected_s)
        return min(self._trial_s, self.left_s if to_the_end or self.total_s is None else min(self.left_s, patience_s))
