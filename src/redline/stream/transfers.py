"""Copies of frames to the device and back, so that a frame is sent while the previous one is computed or returned.

The captured CUDA graph reads its input from one static tensor and writes its output to another. A frame is copied to
and from these tensors on the device, so the copies to and from the host use other memory and can overlap with the
graph.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redline.machine.pinned_copies import CudaDevice, Event, PendingCopy, PinnedCopies

MAX_IN_FLIGHT = 2
_RING = 0


@dataclass(frozen=True)
class Fetched:
    """New pixels owned by the caller, and the seconds that the copy in, the computation and the copy out took."""

    pixels: Tensor
    copy_in_s: float
    busy_s: float
    copy_out_s: float


class HostTransfers:
    """For the CPU: `begin` copies the pixels to the static input and runs the work to completion."""

    def __init__(self, static_input: Tensor, static_output: Tensor) -> None:
        self._input, self._output = static_input, static_output
        self._done: deque[Fetched] = deque()

    def begin(self, pixels: Tensor, work: Callable[[], None]) -> None:
        began_s = time.perf_counter()
        self._input.copy_(pixels)
        sent_s = time.perf_counter()
        work()
        worked_s = time.perf_counter()
        # Copies outside of inference mode, so that the caller may modify the result in place.
        with torch.inference_mode(False):
            made = self._output.clone()
        self._done.append(Fetched(made, sent_s - began_s, worked_s - sent_s, time.perf_counter() - worked_s))

    def is_done(self) -> bool:
        return True

    def finish(self) -> Fetched:
        return self._done.popleft()


@dataclass(frozen=True)
class _InFlight:
    """A frame after `begin` and before `finish`: its copies, the seconds of staging, and the events of its step."""

    sent: PendingCopy
    returned: PendingCopy
    staging_s: float
    began: Event
    ended: Event


class CudaTransfers:
    """For a GPU: the work runs on the CUDA stream `computing`. The host waits only for the last event of a frame.

    `begin` copies pixels to the static input, runs the work and starts to copy the static output to the host. `finish`
    waits for the oldest frame that was begun. At most `MAX_IN_FLIGHT` frames may be in flight.
    """

    def __init__(self, static_input: Tensor, static_output: Tensor, computing: torch.cuda.Stream) -> None:
        self._input, self._output, self._computing = static_input, static_output, computing
        self._device = CudaDevice(static_input.device, computing, timing=True)
        self._copies = PinnedCopies.with_stream_per_direction(self._device, MAX_IN_FLIGHT, self._stage)
        self._copies.preallocate(static_input.nbytes, to_device=True, ring=_RING)
        self._copies.preallocate(static_output.nbytes, to_device=False, ring=_RING)
        # Copies of the static output, because the next frame overwrites it while the result is copied to the host.
        self._results = deque(torch.empty_like(static_output) for _ in range(MAX_IN_FLIGHT))
        # Waits, because the results were allocated on the current stream but are used on other streams.
        torch.cuda.current_stream(static_input.device).synchronize()
        self._in_flight: deque[_InFlight] = deque()
        self._staging_s = 0.0

    def begin(self, pixels: Tensor, work: Callable[[], None]) -> None:
        # The frame that used this result before has finished, so nothing reads it any more.
        result = self._results[0]
        self._results.rotate(-1)
        sent = self._copies.to_device(pixels, _RING)
        began, ended = self._device.event(), self._device.event()
        with torch.cuda.stream(self._computing):
            arrived = sent.wait()
            began.record(self._computing)
            self._input.copy_(arrived)
            work()
            result.copy_(self._output)
            ended.record(self._computing)
            sent.release()
            returned = self._copies.to_host(result, ring=_RING)
        self._in_flight.append(_InFlight(sent, returned, self._staging_s, began, ended))

    def is_done(self) -> bool:
        return self._in_flight[0].returned.is_done()

    def finish(self) -> Fetched:
        frame = self._in_flight.popleft()
        made = frame.returned.wait()
        returned_s = time.perf_counter()
        pixels = torch.from_numpy(made.numpy().copy())
        unstaging_s = time.perf_counter() - returned_s
        frame.returned.release()
        return Fetched(
            pixels,
            frame.staging_s + frame.sent.seconds,
            frame.began.elapsed_time(frame.ended) / 1e3,
            unstaging_s + frame.returned.seconds,
        )

    def _stage(self, target: Tensor, source: Tensor) -> None:
        """Copies with numpy, which uses one thread; torch would use all cores, and delay decoders."""
        began_s = time.perf_counter()
        np.copyto(target.numpy(), source.numpy())
        self._staging_s = time.perf_counter() - began_s
