"""Asynchronous copies between host and device through pinned memory, with the streams and events they need.

`to_device` and `to_host` start a copy on a stream of its own and return a `PendingCopy`, so that copies overlap with
the computation. Pinned buffers, and device buffers for inputs, are reused: a buffer returns to its pool together with
the event of its last use, and is not written before that event.

`PlainCopies` has the same interface without streams, for the CPU.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.cuda import Event

from redline.machine.memory import is_out_of_memory

# Buffers of the shared pools have power-of-two sizes of at least this, so that tensors of many sizes share them.
_SMALLEST_BUFFER_BYTES = 4096


class CudaDevice:
    """A GPU. `computing` is the stream of the computation, by default the current stream of the calling thread.

    With `blocking`, a thread that waits for an event sleeps instead of spinning. With `timing`, events measure time.
    Tests replace this class by one that needs no GPU and delays every copy.
    """

    def __init__(
        self,
        device: torch.device,
        computing: torch.cuda.Stream | None = None,
        blocking: bool = False,
        timing: bool = False,
    ) -> None:
        self._device, self._computing, self._blocking, self.timing = device, computing, blocking, timing

    @property
    def computing(self) -> torch.cuda.Stream:
        return self._computing or torch.cuda.current_stream(self._device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=self.timing, blocking=self._blocking)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
        """Returns uninitialized memory: pinned on the host, else on the device."""
        computing = self.computing
        # The stream context also selects its device. Inference mode is disabled, because a tensor that is created
        # in it cannot be written outside of it.
        with torch.inference_mode(False), torch.cuda.stream(computing):
            if pinned:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            made = torch.empty(shape, dtype=dtype, device=self._device)
        # Waits, because the allocator may have returned memory that queued kernels still read.
        computing.synchronize()
        return made

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Starts a copy on the stream and keeps the memory of both tensors reserved until it has finished."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)  # the allocator must not reuse freed memory before the copy has finished


@dataclass(eq=False)
class _Buffer:
    """Pinned host memory and device memory. A pinned input needs only the device memory, a result only the host memory.

    `host` may be overwritten after the event `copied`, `device` after the event `last_use`.
    """

    size_bytes: int
    host: Tensor | None = None
    device: Tensor | None = None
    copied: Event | None = None
    last_use: Event | None = None

    @property
    def is_idle(self) -> bool:
        return self.last_use is None or self.last_use.query()


class _Pool:
    """Released buffers. If kernels still use all of them, `take` allocates one or, at the limit, reuses the oldest."""

    def __init__(self, make: Callable[[int], _Buffer], limit: int) -> None:
        self._make, self._limit = make, limit
        self._free: deque[_Buffer] = deque()
        self._lock = Lock()

    def take(self, size_bytes: int) -> _Buffer:
        """Returns an idle buffer, a new one, or the oldest busy one; the caller must wait for the buffer's events."""
        with self._lock:
            for buffer in self._free:
                if buffer.size_bytes >= size_bytes and buffer.is_idle:
                    self._free.remove(buffer)
                    return buffer
            oldest = self._free.popleft() if len(self._free) >= self._limit else None
        if oldest is not None and oldest.size_bytes >= size_bytes:
            return oldest
        return self._make(size_bytes)

    def put(self, buffer: _Buffer) -> None:
        with self._lock:
            self._free.append(buffer)


class PendingCopy:
    """A tensor being copied. Only the computing thread may use a device tensor; any thread may use a host tensor."""

    def __init__(
        self,
        tensor: Tensor,
        wait: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        events: tuple[Event | None, Event] | None = None,
    ) -> None:
        self._tensor, self._wait, self._release, self._events = tensor, wait, release, events

    def wait(self) -> Tensor:
        """Waits, then returns a host tensor; returns a device tensor at once, for kernels launched from now on."""
        self._wait()
        return self._tensor

    def release(self) -> None:
        """Returns the buffer to its pool. Afterwards, do not read the tensor or launch work on it."""
        self._release()

    def is_done(self) -> bool:
        return self._events is None or self._events[1].query()

    @property
    def seconds(self) -> float:
        """The duration of the finished copy if the device has timing events, else 0."""
        began, ended = self._events or (None, None)
        return began.elapsed_time(ended) / 1e3 if began is not None and ended is not None else 0.0


class PlainCopies:
    """The interface of `PinnedCopies` for the CPU: passes tensors through, because there is nothing to copy."""

    has_device_memory: ClassVar[bool] = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._target = device

    def to_device(self, tensor: Tensor, ring: int | None = None) -> PendingCopy:
        return PendingCopy(tensor.to(self._target))

    def to_host(self, tensor: Tensor, into: Tensor | None = None, ring: int | None = None) -> PendingCopy:
        return PendingCopy(tensor.cpu() if into is None else into.copy_(tensor))

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized host memory for `to_host`; `PinnedCopies` pins it, which makes the copy faster."""
        return torch.empty(shape, dtype=dtype)


class PinnedCopies(PlainCopies):
    """Copies that overlap with the computation.

    `inward` yields the stream for each copy to the device, `outward` for each copy to the host. `limit` bounds the
    released buffers of each pool, and the copies into pooled host buffers that are in flight at a time.

    By default, calls share buffers of similar size, and `to_device` blocks the host until the last use of its buffer is
    over. With `ring`, a call uses only the buffers of that ring, which have the exact size and are replaced if they are
    too small. The host then does not wait for kernels that still use the device memory: only the copy's stream waits.
    Rings need a stream per direction; on a shared stream, results would queue behind the waiting input.

    `stage` copies bytes of inputs into pinned memory on the host. If there is no device memory for an input, the input
    stays on the host until it is used, and `warn` is called the first time; without `warn`, the error is raised.
    """

    has_device_memory: ClassVar[bool] = True

    def __init__(
        self,
        device: CudaDevice,
        inward: Iterator[Any],
        outward: Iterator[Any],
        limit: int,
        *,
        stage: Callable[[Tensor, Tensor], object] = Tensor.copy_,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.device, self.limit = device, limit
        self._inward, self._outward, self._stage, self._warn = inward, outward, stage, warn
        self._pools: dict[tuple[int, bool, int | None], _Pool] = {}
        self._in_flight: deque[Event] = deque()
        self._lock = Lock()
        self._has_warned = False

    @classmethod
    def with_shared_streams(
        cls, device: CudaDevice, streams: int, warn: Callable[[str], None] | None = None
    ) -> "PinnedCopies":
        """Uses `streams` streams: one computes and the others take copies of both directions in turn."""
        copying = [device.stream() for _ in range(streams - 1)] or [device.computing]
        turns = itertools.cycle(copying)
        return cls(device, turns, turns, streams, warn=warn)

    @classmethod
    def with_stream_per_direction(
        cls, device: CudaDevice, limit: int, stage: Callable[[Tensor, Tensor], object] = Tensor.copy_
    ) -> "PinnedCopies":
        inward, outward = (itertools.repeat(device.stream()) for _ in range(2))
        return cls(device, inward, outward, limit, stage=stage)

    def to_device(self, tensor: Tensor, ring: int | None = None) -> PendingCopy:
        """Starts the copy; any thread may call it. A pinned, contiguous tensor is copied without staging."""
        size, is_staged = tensor.nbytes, not (tensor.is_pinned() and tensor.is_contiguous())
        pool = self._pool(size, True, ring)
        try:
            buffer = pool.take(self._capacity(size, ring))
            if is_staged and buffer.host is None:
                buffer.host = self.empty_host((buffer.size_bytes,), torch.uint8)
        except Exception as error:
            if self._warn is None or not is_out_of_memory(error):
                raise
            if not self._has_warned:
                self._warn("out of memory: inputs that cannot be prefetched are copied when they are used")
            self._has_warned = True
            return PendingCopy(tensor)
        assert buffer.device is not None
        if ring is None and buffer.last_use is not None:
            buffer.last_use.synchronize()
        source = _bytes(tensor)
        if is_staged:
            assert buffer.host is not None
            if buffer.copied is not None:
                buffer.copied.synchronize()
            self._stage(buffer.host[:size], source)
            source = buffer.host[:size]
        stream = next(self._inward)
        if buffer.last_use is not None:
            self.device.wait(stream, buffer.last_use)
        events = self._copy(buffer.device[:size], source, stream)
        buffer.copied = copied = events[1]
        is_waited_for = False

        def wait() -> None:
            nonlocal is_waited_for
            self.device.wait(self.device.computing, copied)
            is_waited_for = True

        def release() -> None:
            if not is_waited_for:  # nothing used the tensor, but the buffer is busy until the copy has finished
                wait()
            buffer.last_use = self._record(self.device.computing)
            pool.put(buffer)

        return PendingCopy(_typed(buffer.device, tensor), wait, release, events)

    def to_host(self, tensor: Tensor, into: Tensor | None = None, ring: int | None = None) -> PendingCopy:
        """Starts a copy that runs after the work launched so far. Only the computing thread may call it.

        Copies into a buffer of the pool, or into `into`, whose memory must be contiguous.
        """
        if into is not None:
            assert into.is_contiguous()
            events = self._copy_computed(_bytes(into), _bytes(tensor))
            return PendingCopy(into, events[1].synchronize, events=events)
        while len(self._in_flight) >= self.limit:
            self._in_flight.popleft().synchronize()
        pool = self._pool(tensor.nbytes, False, ring)
        buffer = pool.take(self._capacity(tensor.nbytes, ring))
        assert buffer.host is not None
        events = self._copy_computed(buffer.host[: tensor.nbytes], _bytes(tensor))
        self._in_flight.append(events[1])
        return PendingCopy(_typed(buffer.host, tensor), events[1].synchronize, lambda: pool.put(buffer), events)

    def empty_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.device.empty(shape, dtype, pinned=True)

    def preallocate(self, size_bytes: int, to_device: bool, ring: int) -> None:
        """Fills the ring with its `limit` buffers, so that no later call allocates."""
        pool = self._pool(size_bytes, to_device, ring)
        for buffer in [pool.take(size_bytes) for _ in range(self.limit)]:
            buffer.host = self.empty_host((size_bytes,), torch.uint8) if buffer.host is None else buffer.host
            pool.put(buffer)

    def _copy_computed(self, target: Tensor, source: Tensor) -> tuple[Event | None, Event]:
        """Copies after the work queued on the computing stream, which may include making `source` contiguous."""
        stream = next(self._outward)
        if stream is not self.device.computing:
            self.device.wait(stream, self._record(self.device.computing))
        return self._copy(target, source, stream)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> tuple[Event | None, Event]:
        """Starts the copy; returns the events before it (None without timing) and after it."""
        began = self._record(stream) if self.device.timing else None
        self.device.copy(target, source, stream)
        return began, self._record(stream)

    def _record(self, stream: Any) -> Event:
        event = self.device.event()
        event.record(stream)
        return event

    def _capacity(self, size_bytes: int, ring: int | None) -> int:
        if ring is not None:
            return size_bytes
        return max(_SMALLEST_BUFFER_BYTES, 1 << (size_bytes - 1).bit_length() if size_bytes else 0)

    def _pool(self, size_bytes: int, is_inward: bool, ring: int | None) -> _Pool:
        def make(capacity: int) -> _Buffer:
            if is_inward:
                return _Buffer(capacity, device=self.device.empty((capacity,), torch.uint8, pinned=False))
            return _Buffer(capacity, host=self.empty_host((capacity,), torch.uint8))

        key = (0 if ring is not None else self._capacity(size_bytes, ring), is_inward, ring)
        with self._lock:
            return self._pools.setdefault(key, _Pool(make, self.limit))


def copies_for(device: torch.device, streams: int, warn: Callable[[str], None]) -> PlainCopies:
    """Returns copies for a computation on the current stream; threads sleep while they wait for a copy."""
    if device.type != "cuda":
        return PlainCopies(device)
    cuda = CudaDevice(device, torch.cuda.current_stream(device), blocking=True)
    return PinnedCopies.with_shared_streams(cuda, streams, warn)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _typed(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
