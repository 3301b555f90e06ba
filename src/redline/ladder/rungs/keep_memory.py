"""keep_memory: tells the CPU allocator to keep freed memory, so that the next layer reuses mapped pages.

glibc requests every block above 32 MiB from the kernel and returns it as soon as it is freed. The activations of a
large image are such blocks, so in each layer the kernel maps and clears their pages again, which can take as long as
the layer itself. Keeping the blocks costs memory: the process keeps its peak memory between calls, and fragmentation
adds to it.

Unlike all other rungs, this rung changes the process beyond its own calls: glibc cannot report the previous setting,
so the setting cannot be restored.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage
from redline.machine.host_memory import keep_freed_memory, torch_allocates_by_glibc
from redline.machine.machine import Machine


@dataclass
class Seen:
    """The page faults of the first call and of the most recent call, and the number of calls."""

    first: int = 0
    last: int = 0
    calls: int = 0


@contextmanager
def _counting(seen: Seen) -> Iterator[None]:
    before = _page_faults()
    yield
    seen.last = _page_faults() - before
    seen.first = seen.first if seen.calls else seen.last
    seen.calls += 1


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass(frozen=True)
class KeepMemory(Rung):
    name = "keep_memory"
    stage = Stage.FLAGS
    summary = "the CPU allocator keeps freed memory, so that layers do not fault in new pages"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if machine.is_cuda:
            return "torch already caches GPU memory"
        if not torch_allocates_by_glibc():
            return "torch does not allocate with glibc malloc in this process"
        return ""

    def apply(self, job: Job) -> Job:
        keep_freed_memory()
        seen = Seen()
        return replace(job.with_evidence(self.name, seen), contexts=(*job.contexts, partial(_counting, seen)))

    def proof(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        if seen.calls < 2 or 2 * seen.last >= seen.first:
            return ""
        return f"{seen.first:,} page faults in the first call, {seen.last:,} in the last of {seen.calls} calls"

    def why_no_proof(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        return f"{seen.last:,} page faults in the last of {seen.calls} call(s), {seen.first:,} in the first"
