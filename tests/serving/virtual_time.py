"""An event loop whose clock stands still while anything can run, and jumps to the next timer when nothing can.

Sockets work as usual, so that a client and a server in this loop talk over TCP, and the times that the client measures
are exactly the delays of the server.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# The kernel delivers to the own machine at once; this is the time that it may take on a busy one.
_DELIVERY_S = 0.005


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(_DELIVERY_S)
        if not ready:
            self.now_s += timeout
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        # As for a clock with this resolution: a timer that is due at the time jumped to runs in the same round.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(main)
