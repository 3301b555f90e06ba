"""keep_memory: what a CPU model frees stays with the process, so that its next layer finds the pages in place.

glibc takes every block above 32 MiB from the kernel and gives it back as soon as it is freed. The activations of a
large picture are such blocks: in each layer the kernel clears their pages and maps them anew, which can take as long
as the layer itself. Here the allocator is told to keep what it has. The price is memory: the process holds its peak
between calls, and pieces that do not fit each other add to it.

The one rung that changes more than its own calls: glibc does not say what it was told before, so it stays told.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage
from redline.machine.host_memory import keep_freed_memory, torch_allocates_by_glibc
from redline.machine.machine import Machine


@dataclass
class Seen:
    """How many pages were new to the process in its first call, in its last, and how many calls there were."""

    first: int = 0
    last: int = 0
    calls: int = 0


@contextmanager
def _counting(seen: Seen) -> Iterator[None]:
    before = _new_pages()
    yield
    seen.last = _new_pages() - before
    if not seen.calls:
        seen.first = seen.last
    seen.calls += 1


def _new_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass(frozen=True)
class KeepMemory(Rung):
    name: ClassVar[str] = "keep_memory"
    stage: ClassVar[Stage] = Stage.FLAGS
    summary: ClassVar[str] = "freed memory stays with the process, and its pages are not made anew in every layer"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if machine.is_cuda:
            return "a GPU's memory is kept by torch already"
        if not torch_allocates_by_glibc():
            return "torch does not take its memory from glibc here, whose allocator it tells what to keep"
        return ""

    def apply(self, job: Job) -> Job:
        keep_freed_memory()
        seen = Seen()
        job = job.with_evidence(self.name, seen)
        return replace(job, contexts=(*job.contexts, partial(_counting, seen)))

    def proof(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        if seen.calls < 2 or 2 * seen.last >= seen.first:
            return ""
        return f"{seen.first:,} pages were new in the first call, {seen.last:,} in the last of {seen.calls}"

    def why_nothing(self, job: Job) -> str:
        seen: Seen = job.evidence[self.name]
        return f"{seen.last:,} pages were new in the last of {seen.calls} call(s), {seen.first:,} in the first"
