"""Tensors on their way to a device and back while it computes: pinned buffers, streams of their own, an event a copy.

One stream computes: a recorded graph has one place for its input, and a network fills a GPU by itself. The others copy,
in turn. What a copy reads or writes is touched again only after an event: a buffer goes back to its pool with the event
of its last use, whoever takes it next waits for that, and a result can only be had by waiting for its own.

On a device without streams nothing is copied, and everything is there at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from redline.machine.memory import is_out_of_memory

# Buffers come in powers of two from this size on, so that pictures of many sizes share them.
_LEAST_BYTES = 4096


class Event(Protocol):
    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Device(Protocol):
    """What copies asynchronously; the tests put one in its place that needs no GPU and takes its time."""

    computing: Any

    def stream(self) -> Any: ...
    def event(self) -> Any: ...
    def buffer(self, size_bytes: int, pinned: bool) -> Tensor: ...
    def wait(self, stream: Any, event: Any) -> None: ...
    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Begins a copy on the stream; the memory of both belongs to it until it is over."""
        ...


class CudaDevice:
    """Made in the thread that computes; used by those that read and write too, where another device is the current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.computing = torch.cuda.current_stream(device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # who waits for it sleeps, and leaves its core to an encoder

    def buffer(self, size_bytes: int, pinned: bool) -> Tensor:
        with torch.cuda.stream(self.computing):  # which makes its device the current one
            if pinned:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            made = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        # Its memory may have been that of a tensor which work in flight still reads.
        self.computing.synchronize()
        return made

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(stream)  # freed meanwhile, it is given to nobody before the copy is over


@dataclass(eq=False)
class _Buffer:
    host: Tensor
    twin: Tensor | None
    last_use: Event | None = None


class _Pool:
    """Buffers of one size, with twins on the device or without. At most `most` wait here unused."""

    def __init__(self, make: Callable[[], _Buffer], most: int) -> None:
        self._make, self._most = make, most
        self._free: deque[_Buffer] = deque()
        self._lock = Lock()

    def take(self) -> _Buffer:
        """One whose last use is over; a new one where all of them are still busy, as long as they are few."""
        with self._lock:
            for buffer in self._free:
                if buffer.last_use is None or buffer.last_use.query():
                    self._free.remove(buffer)
                    return buffer
            oldest = self._free.popleft() if len(self._free) >= self._most else None
        if oldest is None:
            return self._make()
        assert oldest.last_use is not None
        oldest.last_use.synchronize()
        return oldest

    def give_back(self, buffer: _Buffer, last_use: Event | None) -> None:
        buffer.last_use = last_use
        with self._lock:
            self._free.append(buffer)


class Arriving:
    """A tensor on its way: to the device, for the thread that computes; or to the host, for any."""

    def __init__(self, tensor: Tensor, arrived: Callable[[], None], used: Callable[[], None]) -> None:
        self._tensor, self._arrived, self._used = tensor, arrived, used

    def take(self) -> Tensor:
        """The tensor: work on the device that is begun now finds it there, and on the host it is there."""
        self._arrived()
        return self._tensor

    def done(self) -> None:
        """Nothing more will be begun with it: its memory belongs to the next."""
        self._used()


def _nothing() -> None:
    pass


class PlainCopies:
    """Where the host is the device."""

    has_own_memory: ClassVar[bool] = False

    def bring_in(self, tensor: Tensor) -> Arriving:
        return Arriving(tensor, _nothing, _nothing)

    def bring_out(self, tensor: Tensor) -> Arriving:
        return Arriving(tensor, _nothing, _nothing)


@dataclass(eq=False)
class OverlappedCopies(PlainCopies):
    """`streams` in all, one of which computes; so many results may be on their way out at once."""

    has_own_memory: ClassVar[bool] = True  # that of a device, apart from the host's

    device: Device
    streams: int
    say: Callable[[str], None] = lambda _text: None
    _pools: dict[tuple[int, bool], _Pool] = field(default_factory=dict, init=False)
    _on_their_way: deque[Event] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._copying = [self.device.stream() for _ in range(self.streams - 1)] or [self.device.computing]
        self._turn = count()
        self._lock = Lock()
        self._copies_late = False

    def bring_in(self, tensor: Tensor) -> Arriving:
        """Begins the copy; in any thread. Where there is no room yet it stays here, to be copied when it is used."""
        pool, size = self._pool(tensor.nbytes, with_twin=True), tensor.nbytes
        try:
            buffer = pool.take()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._copies_late:
                self.say("out of memory: what does not fit beside the work is copied in when it is worked on")
            self._copies_late = True
            return Arriving(tensor, _nothing, _nothing)
        assert buffer.twin is not None
        twin = buffer.twin[:size]
        buffer.host[:size].copy_(_bytes(tensor))
        stream = self._next_stream()
        self.device.copy(twin, buffer.host[:size], stream)
        copied = self._recorded(stream)

        def arrived() -> None:
            self.device.wait(self.device.computing, copied)

        def used() -> None:
            arrived()  # also where nobody took it: the buffer is busy until the copy is over
            pool.give_back(buffer, self._recorded(self.device.computing))

        return Arriving(twin.view(tensor.dtype).view(tensor.shape), arrived, used)

    def bring_out(self, tensor: Tensor) -> Arriving:
        """Begins the copy as soon as the work that was begun before is done; in the thread that computes."""
        pool, size = self._pool(tensor.nbytes, with_twin=False), tensor.nbytes
        while len(self._on_their_way) >= self.streams:
            self._on_their_way.popleft().synchronize()
        buffer = pool.take()
        source = _bytes(tensor)  # which may be work too, and must be waited for with the rest
        stream = self._next_stream()
        if stream is not self.device.computing:
            self.device.wait(stream, self._recorded(self.device.computing))
        self.device.copy(buffer.host[:size], source, stream)
        copied = self._recorded(stream)
        self._on_their_way.append(copied)
        here = buffer.host[:size].view(tensor.dtype).view(tensor.shape)
        return Arriving(here, copied.synchronize, lambda: pool.give_back(buffer, None))

    def _recorded(self, stream: Any) -> Event:
        event = self.device.event()
        event.record(stream)
        return event

    def _next_stream(self) -> Any:
        return self._copying[next(self._turn) % len(self._copying)]

    def _pool(self, size_bytes: int, with_twin: bool) -> _Pool:
        rounded = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length() if size_bytes else 0)

        def make() -> _Buffer:
            twin = self.device.buffer(rounded, pinned=False) if with_twin else None
            return _Buffer(self.device.buffer(rounded, pinned=True), twin)

        with self._lock:
            return self._pools.setdefault((rounded, with_twin), _Pool(make, self.streams))


def copies_for(device: torch.device, streams: int, say: Callable[[str], None]) -> PlainCopies:
    return OverlappedCopies(CudaDevice(device), streams, say) if device.type == "cuda" else PlainCopies()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
