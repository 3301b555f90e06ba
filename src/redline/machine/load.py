"""The load that other processes put on the CPU, read from /proc."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redline.machine.cores import cores

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# A GPU needs about this many cores to launch kernels without a pause.
_CORES_FOR_A_GPU = 2
# This share of the needed cores is enough: background services may use the rest without a visible effect.
_FREE_SHARE = 0.85


@dataclass(frozen=True)
class Load:
    """The cores that other processes (or other guests of the host) used, and how often our processes were preempted."""

    other_cores: float = 0.0
    preemptions_per_s: float = 0.0

    def is_contended(self, cuda: bool) -> bool:
        return is_contended(self.other_cores, cores(), cuda)

    def slowdown(self, threads: int = 1) -> float:
        """Returns how many times longer `threads` busy threads take under this load."""
        return max(1.0, (self.other_cores + threads) / cores())

    def __str__(self) -> str:
        text = f"other processes used {self.other_cores:.1f} of {cores()} cores"
        return text + (f", preempted {self.preemptions_per_s:.0f} times a second" if self.preemptions_per_s else "")


def is_contended(other_cores: float, cores: int, cuda: bool) -> bool:
    """Returns whether other processes left too few cores: a trial needs all cores on a CPU, and a few for a GPU."""
    needed = min(cores, _CORES_FOR_A_GPU) if cuda else cores
    return cores - other_cores < _FREE_SHARE * needed


class LoadMeter:
    """Measures the load from its creation until `read()`; `pids` are our child processes, whose load is left out."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = (os.getpid(), *pids)
        self._start = (time.monotonic(), _busy_s(), self._own_s(), self._preemptions())

    def read(self) -> Load:
        start_s, busy_s, own_s, preemptions = self._start
        wall_s = max(time.monotonic() - start_s, 1e-3)
        others_s = _busy_s() - busy_s - (self._own_s() - own_s)
        return Load(max(0.0, others_s / wall_s), max(0.0, (self._preemptions() - preemptions) / wall_s))

    def _own_s(self) -> float:
        return sum(map(_process_s, self._pids))

    def _preemptions(self) -> int:
        return sum(map(_involuntary_switches, self._pids[1:]))


def current_load(seconds: float = 0.3) -> Load:
    """Waits for `seconds` and returns the load meanwhile. Our child processes must be idle, or they count as load."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.read()


def _busy_s() -> float:
    """Returns the busy seconds of all cores in total, including the time that the host gave to other guests."""
    with suppress(OSError, ValueError, IndexError):
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + soft + steal) / _TICKS_PER_S
    return 0.0


def _process_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return 0.0


def _involuntary_switches(pid: int) -> int:
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError, ValueError, IndexError):
            total += int(status.read_text().rpartition("nonvoluntary_ctxt_switches:")[2].split()[0])
    return total
