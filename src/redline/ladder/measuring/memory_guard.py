"""Keeps trials from exhausting the memory of the machine: ends the largest trial before the system stops responding.

A limit on a process's address space does not work, because CUDA reserves far more address space than it uses. So a
thread monitors the available memory; the memory of a trial includes that of the compilers that it started.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from redline.machine.host_memory import available_host_bytes, host_bytes
from redline.notation import format_bytes

_INTERVAL_S = 0.25
# The largest trial is ended when less memory than this is available.
_LEAST_SHARE, _LEAST_BYTES = 0.05, 768 * 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryGuard:
    """Calls `end(pid, reason)` for the largest of the running workers while too little memory is available.

    `workers` returns the process ids of the running workers, each of which leads its own session.
    """

    def __init__(self, workers: Callable[[], Iterable[int]], end: Callable[[int, str], None]) -> None:
        self._workers, self._end = workers, end
        self.least_bytes = max(_LEAST_BYTES, int(_LEAST_SHARE * host_bytes()))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.check()

    def check(self) -> None:
        available = available_host_bytes()
        if available >= self.least_bytes:
            return
        held = _bytes_by_session()
        workers = [pid for pid in self._workers() if pid in held]
        if not workers:
            return
        largest = max(workers, key=lambda pid: held[pid])
        self._end(
            largest,
            f"the trial used {format_bytes(held[largest])} of host memory (with its compilers), and the machine had "
            f"{format_bytes(available)} left",
        )


def _bytes_by_session() -> dict[int, int]:
    """Returns the resident bytes of each session: the sum over its processes."""
    held: dict[int, int] = defaultdict(int)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            held[int(fields[3])] += int(fields[21]) * _PAGE_BYTES
    return held
