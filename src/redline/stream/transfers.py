"""Frames on their way to the device and back, in pinned memory, two places each and streams of their own.

A frame can be sent while the one before is computed, and the one before that fetched. The recorded work has one place
for its input and one for its output: what goes through them is copied inside the device's own memory. Into and out of
pinned memory numpy copies, by one thread: torch would wake one on every core, where decoders are at work.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PLACES = 2


@dataclass(frozen=True)
class Fetched:
    """New pixels that nobody else holds, and the seconds that a frame took on its way in, in the device, and out."""

    pixels: Tensor
    copy_in_s: float
    busy_s: float
    copy_out_s: float


class Transfers(Protocol):
    """`begin` sends pixels to `arriving`, does the work and starts to fetch `leaving`; `finish` waits for the oldest
    that was begun, if it is not done. No more than `PLACES` may be under way."""

    def begin(self, pixels: Tensor, work: Callable[[], None]) -> None: ...

    def is_done(self) -> bool: ...

    def finish(self) -> Fetched: ...


class HostTransfers:
    """Where the host is the device: the work is over when it has begun."""

    def __init__(self, arriving: Tensor, leaving: Tensor) -> None:
        self._arriving, self._leaving = arriving, leaving
        self._done: list[Fetched] = []

    def begin(self, pixels: Tensor, work: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        self._arriving.copy_(pixels)
        sent_s = time.perf_counter()
        work()
        worked_s = time.perf_counter()
        # What is handed out is an ordinary tensor, which its taker may change.
        with torch.inference_mode(False):
            made = self._leaving.clone()
        self._done.append(Fetched(made, sent_s - began_s, worked_s - sent_s, time.perf_counter() - worked_s))

    def is_done(self) -> bool:
        return True

    def finish(self) -> Fetched:
        return self._done.pop(0)


class _Place:
    """Memory of both sides for one frame, and events at each of its turns."""

    def __init__(self, arriving: Tensor, leaving: Tensor) -> None:
        self.host_in = torch.empty(arriving.shape, dtype=arriving.dtype, pin_memory=True)
        self.host_out = torch.empty(leaving.shape, dtype=leaving.dtype, pin_memory=True)
        self.sent, self.made = torch.empty_like(arriving), torch.empty_like(leaving)
        self.staged_s = 0.0
        self.in_began, self.in_ended, self.began, self.ended, self.out_began, self.out_ended = (
            torch.cuda.Event(enable_timing=True) for _ in range(6)
        )


class CudaTransfers:
    """`computing` is the stream of the work; it is never waited for by the host, but through a frame's last event."""

    def __init__(self, arriving: Tensor, leaving: Tensor, computing: torch.cuda.Stream) -> None:
        self._arriving, self._leaving, self._computing = arriving, leaving, computing
        self._sending, self._fetching = (torch.cuda.Stream(arriving.device) for _ in range(2))
        self._places = [_Place(arriving, leaving) for _ in range(PLACES)]
        # The places were made on the current stream, and are used on three others.
        torch.cuda.current_stream(arriving.device).synchronize()
        self._begun = self._finished = 0

    def begin(self, pixels: Tensor, work: Callable[[], None]) -> None:
        # The frame that was in this place has been waited for to its end, so all of its memory is free.
        place = self._places[self._begun % PLACES]
        self._begun += 1
        began_s = time.perf_counter()
        np.copyto(place.host_in.numpy(), pixels.numpy())
        place.staged_s = time.perf_counter() - began_s
        with torch.cuda.stream(self._sending):
            place.in_began.record()
            place.sent.copy_(place.host_in, non_blocking=True)
            place.in_ended.record()
        with torch.cuda.stream(self._computing):
            self._computing.wait_event(place.in_ended)
            place.began.record()
            self._arriving.copy_(place.sent)
            work()
            place.made.copy_(self._leaving)
            place.ended.record()
        with torch.cuda.stream(self._fetching):
            self._fetching.wait_event(place.ended)
            place.out_began.record()
            place.host_out.copy_(place.made, non_blocking=True)
            place.out_ended.record()

    def is_done(self) -> bool:
        return self._places[self._finished % PLACES].out_ended.query()

    def finish(self) -> Fetched:
        place = self._places[self._finished % PLACES]
        self._finished += 1
        place.out_ended.synchronize()
        fetched_s = time.perf_counter()
        pixels = torch.from_numpy(place.host_out.numpy().copy())
        unstaged_s = time.perf_counter() - fetched_s
        return Fetched(
            pixels,
            place.staged_s + place.in_began.elapsed_time(place.in_ended) / 1e3,
            place.began.elapsed_time(place.ended) / 1e3,
            unstaged_s + place.out_began.elapsed_time(place.out_ended) / 1e3,
        )
