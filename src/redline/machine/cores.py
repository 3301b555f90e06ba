"""Reads CPU cores and fields of files in /proc, without importing torch."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


def proc_field(file: str, *names: str) -> str | None:
    """Returns the text after the colon in the first line of /proc/`file` that begins with a name, or None."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return None


def cores() -> int:
    """Returns the number of CPU cores that this process may use, which its affinity may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def physical_cores() -> tuple[int, ...]:
    """Returns one hardware thread of each core that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    first: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(number)
        first.setdefault(siblings, number)
    return tuple(first.values())
