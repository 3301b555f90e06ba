"""Monitors memory and throughput of a program, and keeps a pool of reusable buffers."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.host_memory import host_bytes, peak_resident_bytes, reset_peak_resident, resident_bytes
from redline.machine.machine import resolve_device
from redline.notation import format_bytes

_Key = tuple[tuple[int, ...], torch.dtype]
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether the error, or an error that caused it, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def free_cuda_caches() -> None:
    """Frees the GPU memory of unreachable tensors, the cuBLAS workspaces and the allocator's cached blocks.

    Call it before measuring memory as the difference of two readings. A cuBLAS workspace (32 MiB for each stream on
    Hopper) stays allocated until a CUDA graph capture frees it; if that happens between the readings, the difference
    is too small and may be negative.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryReading:
    """Bytes in use on one device; on a CPU the resident memory of this process."""

    device: str
    current_bytes: int
    peak_bytes: int
    # Bytes that the allocator holds, used or not; equal to current_bytes on a CPU.
    reserved_bytes: int
    total_bytes: int

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that the allocator holds but no tensor uses."""
        return self.reserved_bytes - self.current_bytes

    def __str__(self) -> str:
        now, peak = format_bytes(self.current_bytes), format_bytes(self.peak_bytes)
        text = f"{self.device}: {now} now, {peak} at the peak"
        if self.device != "cpu":
            text += f", {format_bytes(self.fragmentation_bytes)} held unused"
        return f"{text}, of {format_bytes(self.total_bytes)}"


class MemoryMonitor:
    """Measures memory: `with MemoryMonitor() as monitor: …`, then `monitor.peak_bytes` or `monitor.log_memory()`.

    The peak is measured since the monitor was created or last entered. torch records the peak of a GPU, and Linux the
    peak of a process. If the peak of the process cannot be reset, a thread reads the memory every `interval_s`.
    """

    def __init__(self, device: str = "auto", interval_s: float = 0.01) -> None:
        self.device = resolve_device(device)
        self.interval_s = interval_s
        self._polled_peak: int | None = None
        self._highest_read = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.reset()

    def reset(self) -> None:
        """Resets the peak."""
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._highest_read = 0
            self._polled_peak = None if reset_peak_resident() else resident_bytes()

    def read(self) -> MemoryReading:
        if self.device == "cpu":
            current = resident_bytes()
            polled = self._polled_peak
            peak = peak_resident_bytes() if polled is None else polled
            # The kernel updates the peak with a delay, so the current value may exceed it by some pages per thread.
            self._highest_read = max(self._highest_read, current)
            return MemoryReading("cpu", current, max(peak, self._highest_read), current, host_bytes())
        current = torch.cuda.memory_allocated(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        return MemoryReading(self.device, current, peak, torch.cuda.memory_reserved(self.device), total)

    @property
    def current_bytes(self) -> int:
        return self.read().current_bytes

    @property
    def peak_bytes(self) -> int:
        return self.read().peak_bytes

    def log_memory(self, label: str = "", file: TextIO | None = None) -> str:
        """Prints one line, to stderr by default, and returns it."""
        line = f"{label}: {self.read()}" if label else str(self.read())
        print(line, file=file or sys.stderr)
        return line

    def __enter__(self) -> "MemoryMonitor":
        self.reset()
        if self._polled_peak is not None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._poll, name="memory monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _poll(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._polled_peak = max(self._polled_peak or 0, resident_bytes())


class PerformanceTracker:
    """Measures items per second over the last `window_s` seconds; call `update(items)` after each step.

    Time starts at `start()` or at the first update, so that loading does not count.
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        if window_s <= 0:
            raise RedlineError(f"window_s must be positive, not {window_s}.")
        self.window_s = window_s
        self.items = 0.0
        self._clock = clock
        self._began: float | None = None
        self._events: deque[tuple[float, float]] = deque()

    def start(self) -> None:
        """Starts the clock and resets the counts."""
        self._began = self._clock()
        self._events.clear()
        self._events.append((self._began, 0.0))
        self.items = 0.0

    def update(self, items: float = 1.0) -> None:
        """Counts `items` that were just finished. Without `start()`, the first update only starts the clock."""
        if self._began is None:
            self.start()
            return
        now = self._clock()
        self.items += items
        self._events.append((now, items))
        # The oldest event marks the start of the window, so its items do not count.
        while len(self._events) > 2 and self._events[1][0] <= now - self.window_s:
            self._events.popleft()

    @property
    def throughput(self) -> float:
        """Items per second in the window; 0 before the first step is finished."""
        if len(self._events) < 2:
            return 0.0
        elapsed = self._events[-1][0] - self._events[0][0]
        finished = sum(items for _, items in list(self._events)[1:])
        return finished / elapsed if elapsed > 0 else 0.0

    @property
    def mean_throughput(self) -> float:
        """Items per second since the start."""
        if self._began is None or len(self._events) < 2:
            return 0.0
        elapsed = self._events[-1][0] - self._began
        return self.items / elapsed if elapsed > 0 else 0.0


class MemoryPool:
    """A pool of reusable buffers, so that a loop does not allocate. Each buffer has at most one user at a time.

        pool = MemoryPool()
        with pool.lend((8, 3, 64, 64)) as frame:
            …

    `take` and `give_back` are the two halves of `lend`. Buffers are not cleared.
    """

    def __init__(self, device: str = "auto", dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(resolve_device(device))
        self.dtype = dtype
        self.hits = 0
        self.misses = 0
        self._free: dict[_Key, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def _empty(self, key: _Key) -> Tensor:
        return torch.empty(key[0], dtype=key[1], device=self.device)

    def reserve(self, shape: Sequence[int], count: int = 1, dtype: torch.dtype | None = None) -> None:
        """Allocates free buffers in advance."""
        key = tuple(shape), dtype or self.dtype
        made = [self._empty(key) for _ in range(count)]
        with self._lock:
            self._free.setdefault(key, []).extend(made)

    def take(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Returns a buffer for exclusive use until `give_back`."""
        key = tuple(shape), dtype or self.dtype
        with self._lock:
            free = self._free.get(key)
            self.hits, self.misses = self.hits + bool(free), self.misses + (not free)
            buffer = free.pop() if free else self._empty(key)
            self._lent[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        with self._lock:
            if self._lent.pop(id(buffer), None) is None:
                raise RedlineError("this buffer is not lent: it was already given back, or it belongs to another pool.")
            self._free.setdefault((tuple(buffer.shape), buffer.dtype), []).append(buffer)

    @contextmanager
    def lend(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        buffer = self.take(shape, dtype)
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    @property
    def lent(self) -> int:
        return len(self._lent)

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, lent or free."""
        with self._lock:
            free = sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
            return free + sum(buffer.nbytes for buffer in self._lent.values())

    def clear(self) -> None:
        """Frees all buffers that are not lent."""
        with self._lock:
            self._free.clear()
