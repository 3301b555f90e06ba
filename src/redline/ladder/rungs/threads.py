"""threads: sets the number of CPU threads of torch, OpenMP and ONNX Runtime around every call, and can pin them.

By default torch uses one thread per core. An operation ends when its slowest thread ends. On a machine with other busy
processes that thread first waits for a core, so fewer threads can be ten times faster. Small operations gain nothing
from more threads even on an idle machine.

`pin` keeps the calling thread, and the threads that OpenMP starts during a call, on one hardware thread per core.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.cores import physical_cores
from redline.machine.machine import Machine


@dataclass
class Seen:
    """The number of threads outside of calls, and the number of threads and cores inside the last call."""

    outside: int
    inside: int = 0
    cores: int = 0


@contextmanager
def _threads(count: int, pin: bool, seen: Seen) -> Iterator[None]:
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0) if pin else set()
    torch.set_num_threads(count)
    try:
        if pin:
            os.sched_setaffinity(0, physical_cores()[:count])
            seen.cores = len(os.sched_getaffinity(0))
        seen.inside = torch.get_num_threads()
        yield
    finally:
        torch.set_num_threads(before)
        if pin:
            os.sched_setaffinity(0, cores)


@dataclass(frozen=True)
class Threads(Rung):
    name = "threads"
    stage = Stage.FLAGS
    summary = "the number of CPU threads of each operation, and the cores that they stay on"

    count: int = option(1, "threads per operation", at_least=1)
    pin: bool = option(False, "keep the threads on one hardware thread per core")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        """Returns variants with other numbers of threads than torch uses now: 1, cores / 2, cores, and a pinned one."""
        if machine.is_cuda:
            return (cls(),)
        counts = dict.fromkeys((1, max(1, machine.cores // 2), machine.cores))
        counts.pop(torch.get_num_threads(), None)
        physical = len(physical_cores())
        # Pinning makes a difference only if some cores stay unused.
        pinned = (cls(physical, pin=True),) if 1 < physical < machine.cores else ()
        return (*map(cls, counts), *pinned)

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if machine.is_cuda:
            return "the model runs on a GPU"
        if self.count > machine.cores:
            return f"{self.count} threads need as many cores, and this process may use {machine.cores}"
        if self.pin and not hasattr(os, "sched_setaffinity"):
            return "pin=true needs Linux"
        if self.pin and self.count > len(physical_cores()):
            return f"pin=true needs {self.count} cores, and this process may use {len(physical_cores())}"
        if job is not None and self.count == torch.get_num_threads() and not self.pin:
            return f"torch uses {self.count} thread{'s' if self.count > 1 else ''} already"
        return ""

    def apply(self, job: Job) -> Job:
        seen = Seen(torch.get_num_threads())
        context = partial(_threads, self.count, self.pin, seen)
        # Entered before all other contexts, so that engines and compilers of later rungs use this number of threads.
        return replace(job, contexts=(context, *job.contexts)).with_evidence(self.name, seen)

    def proof(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        if seen.inside != self.count:
            return ""
        pinned = f", pinned to {seen.cores} core{'s' if seen.cores > 1 else ''}" if self.pin else ""
        return f"{seen.inside} thread{'s' if seen.inside > 1 else ''} instead of {seen.outside}{pinned}"
