"""Detects the end of the backlog that a live source sent while it was opened and the model was set up.

The backlog is skipped, because its duration would otherwise add to the latency of every later frame. A stream does not
say how old its frames are, but packets of the backlog are available at once, while the reader has to wait for new ones.
"""

import time

# A wait this long means that the packet is new. Two in a row are required, because a busy machine causes single waits.
_WAITED_S, _IN_A_ROW = 0.004, 2
# A source that sends bursts, or faster than it is read, is accepted after this time.
_LONGEST_S = 3.0


class Backlog:
    """Uses wall time even if the stream's clock is simulated, because the network is real."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._waits = 0

    @property
    def is_over(self) -> bool:
        return self._waits >= _IN_A_ROW or time.monotonic() - self._began_s > _LONGEST_S

    def read(self, waited_s: float) -> None:
        """Records that the reader waited this long for a packet."""
        if not self.is_over:
            self._waits = self._waits + 1 if waited_s >= _WAITED_S else 0
