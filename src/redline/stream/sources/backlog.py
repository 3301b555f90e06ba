"""What a live source sent before anybody read it, while it was opened and the model set up: passed over, or every frame
behind it would be as old as it is long.

Nothing in a stream says how old a picture is. But what lies there is read at once, and for what comes now one waits.
"""

import time

# Whoever waits so long was there before the picture; twice in a row, since a busy machine makes anybody wait once.
_WAITED_S, _IN_A_ROW = 0.004, 2
# A source that comes in bursts, or faster than it is read, is taken as it comes after so long.
_LONGEST_S = 3.0


class Backlog:
    """Wall time, whatever the stream's clock is: a network is of the real world."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._waits = 0

    @property
    def is_over(self) -> bool:
        return self._waits >= _IN_A_ROW or time.monotonic() - self._began_s > _LONGEST_S

    def read(self, waited_s: float) -> None:
        """A packet came after so long."""
        if not self.is_over:
            self._waits = self._waits + 1 if waited_s >= _WAITED_S else 0
