"""Host memory as the kernel reports it: the resident memory of this process, its peak, and the available memory."""

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

from redline.machine.cores import proc_field

# Constants from malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_PROBE_BYTES = 64 * 2**20
_CONTAINER = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Returns the resident memory of this process, or its peak on systems without /proc."""
    held = _proc_bytes("self/status", "VmRSS")
    return peak_resident_bytes() if held is None else held


def peak_resident_bytes() -> int:
    """Returns the peak resident memory since the start or the last `reset_peak_resident`."""
    peak = _proc_bytes("self/status", "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident() -> bool:
    """Resets the peak and returns whether that worked; only Linux supports it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    # Some sandboxes accept the write but ignore it.
    return peak_resident_bytes() <= resident_bytes() + 16 * 2**20


def return_freed_memory() -> None:
    """Makes the allocator return freed memory to the system, so that it does not count as resident.

    Torch's allocator on some CPUs (mimalloc) keeps freed pages until an allocation at least 0.1 s later; glibc keeps
    them until `malloc_trim`.
    """
    time.sleep(0.2)
    torch.empty(2**28, dtype=torch.uint8)
    with contextlib.suppress(AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory and serve large blocks from its heap, for the life of the process.

    This cannot be undone, because the previous settings cannot be read. Only the main thread's heap can grow beyond
    64 MiB.
    """
    for setting, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
        ctypes.CDLL(None).mallopt(setting, value)


@functools.cache
def torch_allocates_by_glibc() -> bool:
    """Returns whether torch allocates through glibc; builds for some CPUs include another allocator."""
    if platform.libc_ver()[0] != "glibc":
        return False
    before = _glibc_bytes()
    block = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    # The modulo is needed because the 32-bit counters of glibc wrap around.
    return (_glibc_bytes() - before) % 2**32 >= block.nbytes


def _glibc_bytes() -> int:
    """Returns the bytes that glibc has allocated, on its heap and with mmap."""
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = _Mallinfo
    counted = mallinfo()
    return counted.hblkhd + counted.uordblks


class _Mallinfo(ctypes.Structure):
    """The result of `mallinfo`: `hblkhd` counts bytes from mmap, `uordblks` bytes of the heap."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_: ClassVar = [(name, ctypes.c_uint) for name in _names]


def _proc_bytes(file: str, field: str) -> int | None:
    found = proc_field(file, f"{field}:")
    return None if found is None else int(found.split()[0]) * 1024


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_host_bytes() -> int:
    """Returns the memory that can be allocated without swapping, within the limit of the container if there is one."""
    available = _proc_bytes("meminfo", "MemAvailable")
    available = host_bytes() if available is None else available
    try:
        limit = (_CONTAINER / "memory.max").read_text().strip()
        used = int((_CONTAINER / "memory.current").read_text()) - _cached_bytes()
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def _cached_bytes() -> int:
    """Returns the container's inactive page cache, which the kernel frees on demand."""
    try:
        counted = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(counted.get("inactive_file", 0))
