"""Concurrent callers: threads that call a model at the same time, as the requests of a server do."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from redline.ladder.measuring.judge import Refused, detached, judge
from redline.ladder.workload import Inputs, Workload

# The calls of each caller with each batch whose outputs are judged.
_ROUNDS = 3


class Callers:
    """Threads that take the next call as soon as their last one has returned; on CUDA each has a stream of its own."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count)
        is_cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) if is_cuda else None for _ in range(count)]

    def run(self, calls: int, call: Callable[[int], object], clock: Callable[[], float]) -> float:
        """Makes the calls 0 to `calls` - 1, and returns the seconds from the first call to the end of the last one."""
        numbers = itertools.count()  # next() of a count is atomic
        start: list[float] = []
        # The last thread that is ready reads the clock before any of them calls.
        ready = threading.Barrier(self.count, action=lambda: start.append(clock()))

        def work(stream: torch.cuda.Stream | None) -> float:
            ready.wait()
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                while (number := next(numbers)) < calls:
                    call(number)
                    if stream is not None:
                        stream.synchronize()  # a request counts as finished when the GPU has computed its result
            return clock()

        ends = [self._threads.submit(work, stream) for stream in self._streams]
        return max(end.result() for end in ends) - start[0]


def judge_concurrent_calls(
    callers: Callers, workload: Workload, run: Callable[..., Any], batches: Sequence[Inputs]
) -> None:
    """Raises Refused if concurrent calls do not return the outputs of single calls, as judged by the workload's gates.

    A plan with static buffers, such as those of a CUDA graph, mixes up the outputs of its callers.
    """
    alone = [detached(workload.step(run, batch)) for batch in batches]
    calls = _ROUNDS * callers.count * len(batches)
    outputs: dict[int, Any] = {}

    def call(number: int) -> None:
        outputs[number] = detached(workload.step(run, batches[number % len(batches)]))

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    callers.run(calls, call, time.perf_counter)
    expected = [alone[number % len(alone)] for number in range(calls)]
    for score in judge(workload.gates, expected, [outputs[number] for number in range(calls)]):
        if not score.passed:
            raise Refused(f"its outputs are wrong if {callers.count} callers call it at once: {score}")
