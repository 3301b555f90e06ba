"""Memory of the host as the kernel sees it: what this process holds in RAM, its peak, and what is still free."""

import contextlib
import ctypes
import functools
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_PROBE_BYTES = 64 * 2**20
_CONTAINER = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """What this process holds now; where there is no /proc, the most it has held."""
    held = _status_bytes("VmRSS")
    return peak_resident_bytes() if held is None else held


def peak_resident_bytes() -> int:
    """The most it has held since it began, or since the last `reset_peak_resident`."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident() -> bool:
    """Whether the kernel let the peak start anew; elsewhere than on Linux it is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Some sandboxes take the write and ignore it.
    return peak_resident_bytes() <= resident_bytes() + 16 * 2**20


def return_freed_memory() -> None:
    """Has the allocator give back what was freed, as it would in time anyway, so that it does not count as held.

    Torch's allocator on some CPUs (mimalloc) keeps freed pages until it is asked for memory a tenth of a second later;
    that of the C library keeps them until it is told.
    """
    time.sleep(0.2)
    torch.empty(2**28, dtype=torch.uint8)
    with contextlib.suppress(AttributeError):  # there is none but in glibc
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Tells glibc to take no block from the kernel by itself and to give none back; for the life of the process.

    What it was told before cannot be read, so it cannot be untold. Heaps of other threads than the first end at 64 MiB,
    whatever they are told.
    """
    for setting, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
        ctypes.CDLL(None).mallopt(setting, value)


@functools.cache
def torch_allocates_by_glibc() -> bool:
    """Whether glibc counts a block that torch takes: builds for some CPUs bring an allocator of their own."""
    if platform.libc_ver()[0] != "glibc":
        return False
    before = _glibc_bytes()
    block = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    # The counters have 32 bits.
    return (_glibc_bytes() - before) % 2**32 >= block.nbytes


def _glibc_bytes() -> int:
    """What glibc has handed out, of its heap and as blocks of their own."""
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = _Mallinfo
    counted = mallinfo()
    return counted.hblkhd + counted.uordblks


class _Mallinfo(ctypes.Structure):
    """Blocks of their own are counted by `hblkhd`, those of the heap by `uordblks`."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_: ClassVar = [(name, ctypes.c_uint) for name in _names]


def _status_bytes(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_host_bytes() -> int:
    """What a new process could still take without swapping, within this container's limit if it has one."""
    available = host_bytes()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (_CONTAINER / "memory.max").read_text().strip()
        used = int((_CONTAINER / "memory.current").read_text()) - _cached_bytes()
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def _cached_bytes() -> int:
    """What a container holds of files only so as not to read them again, and the kernel gives up when it is asked."""
    try:
        counted = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(counted.get("inactive_file", 0))
