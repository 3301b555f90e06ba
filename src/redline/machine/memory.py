"""Memory and throughput while a program runs: a monitor, a tracker, and a pool of buffers to use again."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.host_memory import host_bytes, peak_resident_bytes, reset_peak_resident, resident_bytes
from redline.machine.machine import resolve_device
from redline.notation import format_bytes

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Looks at what caused it too: a workload's own sentence may be wrapped around it."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def free_cuda_caches() -> None:
    """Frees the GPU memory of unreachable tensors, cuBLAS's workspaces and the blocks that the allocator caches.

    Call it before a measurement that subtracts what was allocated before. A workspace stays allocated (32 MiB for each
    stream on Hopper) until a CUDA graph capture frees all of them: freed during the measurement, it lowers the result,
    which may become negative.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryReading:
    """Bytes in use on one device; on a CPU they are this process's resident pages."""

    device: str
    current_bytes: int
    peak_bytes: int
    # What the allocator holds from the driver, used or not; on a CPU the same as current.
    reserved_bytes: int
    total_bytes: int

    @property
    def fragmentation_bytes(self) -> int:
        """Held by the allocator and used by no tensor."""
        return self.reserved_bytes - self.current_bytes

    def __str__(self) -> str:
        now, peak = format_bytes(self.current_bytes), format_bytes(self.peak_bytes)
        said = f"{self.device}: {now} now, {peak} at the peak"
        if self.device != "cpu":
            said += f", {format_bytes(self.fragmentation_bytes)} held unused"
        return f"{said}, of {format_bytes(self.total_bytes)}"


class MemoryMonitor:
    """`with MemoryMonitor() as monitor: …` and then `monitor.peak_bytes`; `monitor.log_memory()` at any time.

    The peak is that of the time since it was entered (or made). A GPU's allocator keeps its own peak. Linux
    keeps one for a process and lets it start anew; where it does not, a thread looks every `interval_s`.
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
        """Starts the peak anew."""
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
            # The kernel's own peak lags behind its count by some pages a thread.
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
        """Prints one line (to stderr unless told) and returns it."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _poll(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._polled_peak = max(self._polled_peak or 0, resident_bytes())


class PerformanceTracker:
    """Items per second over the last `window_s` seconds; `update(items)` after each step.

    The clock is monotonic, and starts at the first update or at `start()`, so that loading does not count.
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        if window_s <= 0:
            raise RedlineError(f"window_s must be above zero, not {window_s}.")
        self.window_s = window_s
        self.items = 0.0
        self._clock = clock
        self._began: float | None = None
        self._events: deque[tuple[float, float]] = deque()

    def start(self) -> None:
        """The first step begins now."""
        self._began = self._clock()
        self._events.clear()
        self._events.append((self._began, 0.0))
        self.items = 0.0

    def update(self, items: float = 1.0) -> None:
        """`items` were finished just now. Without `start()` the first update only starts the clock."""
        if self._began is None:
            self.start()
            return
        now = self._clock()
        self.items += items
        self._events.append((now, items))
        # The oldest event is the beginning of the window: its own items were finished before it.
        while len(self._events) > 2 and self._events[1][0] <= now - self.window_s:
            self._events.popleft()

    @property
    def throughput(self) -> float:
        """Items per second in the window; 0 before anything was finished."""
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
    """Buffers that are used again, so that a loop does not allocate. No buffer ever has two holders.

        pool = MemoryPool()
        with pool.lend((8, 3, 64, 64)) as frame:
            …

    `take` and `give_back` are the same in two halves. A buffer's contents are whatever its last holder left.
    """

    def __init__(self, device: str = "auto", dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(resolve_device(device))
        self.dtype = dtype
        self.hits = 0
        self.misses = 0
        self._free: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def _key(
        self, shape: Sequence[int], dtype: torch.dtype | None
    ) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return tuple(shape), dtype or self.dtype, self.device

    def reserve(self, shape: Sequence[int], count: int = 1, dtype: torch.dtype | None = None) -> None:
        """Makes buffers ahead of time."""
        key = self._key(shape, dtype)
        made = [torch.empty(key[0], dtype=key[1], device=key[2]) for _ in range(count)]
        with self._lock:
            self._free.setdefault(key, []).extend(made)

    def take(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A buffer that is the caller's alone until it is given back."""
        key = self._key(shape, dtype)
        with self._lock:
            free = self._free.get(key)
            if free:
                self.hits += 1
                buffer = free.pop()
            else:
                self.misses += 1
                buffer = torch.empty(key[0], dtype=key[1], device=key[2])
            self._lent[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        with self._lock:
            if self._lent.pop(id(buffer), None) is None:
                raise RedlineError("this buffer is not lent: it was given back before, or is not of this pool.")
            self._free.setdefault(self._key(buffer.shape, buffer.dtype), []).append(buffer)

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
        """All the memory of the pool, lent or free."""
        with self._lock:
            free = sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
            return free + sum(buffer.nbytes for buffer in self._lent.values())

    def clear(self) -> None:
        """Lets go of every free buffer; lent ones stay their holders'."""
        with self._lock:
            self._free.clear()
