"""Concurrent callers: they call at the same time, their errors are raised, and mixed-up outputs are refused."""

import threading
import time
from typing import Any

import pytest
import torch

from redline.errors import Refused
from redline.ladder.measuring.callers import Callers, judge_concurrent_calls
from redline.ladder.workload import Workload

CPU = torch.device("cpu")
BATCHES = [torch.full((4,), float(number + 1)) for number in range(4)]
WORKLOAD = Workload(lambda: torch.nn.Identity(), lambda seed: torch.ones(4))


def test_calls_overlap_and_each_is_made_once() -> None:
    made: list[int] = []
    together = threading.Barrier(4, timeout=60)  # breaks if fewer than four calls run at the same time

    def call(number: int) -> None:
        together.wait()
        made.append(number)

    seconds = Callers(4, CPU).run(12, call, time.perf_counter)
    assert sorted(made) == list(range(12)) and seconds > 0


def test_no_call_is_outside_the_time() -> None:
    """Time passes only in calls: none of it may be lost before the clock is read."""
    made: list[int] = []
    for _ in range(50):
        made.clear()
        assert Callers(2, CPU).run(6, made.append, lambda: float(len(made))) == 6


@pytest.mark.gpu
def test_each_caller_has_a_stream_of_its_own_on_cuda() -> None:
    together = threading.Barrier(3, timeout=60)
    streams: list[int] = []

    def call(number: int) -> None:
        together.wait()
        streams.append(torch.cuda.current_stream().cuda_stream)

    Callers(3, torch.device("cuda")).run(3, call, time.perf_counter)
    assert len(set(streams)) == 3 and torch.cuda.default_stream().cuda_stream not in streams


def test_an_error_of_a_call_is_raised() -> None:
    def call(number: int) -> None:
        raise ValueError("this call is broken")

    with pytest.raises(ValueError, match="this call is broken"):
        Callers(2, CPU).run(4, call, time.perf_counter)


class Buffered:
    """Keeps its input in a buffer, as a captured CUDA graph does."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer.copy_(x)
        time.sleep(0.002)
        return self.buffer * 2


def test_plan_that_mixes_up_its_callers_is_refused() -> None:
    judge_concurrent_calls(Callers(4, CPU), WORKLOAD, lambda x: x * 2, BATCHES)
    judge_concurrent_calls(Callers(1, CPU), WORKLOAD, Buffered(), BATCHES)
    shared: Any = Buffered()
    with pytest.raises(Refused, match="its outputs are wrong if 4 callers call it at once: relative_error"):
        judge_concurrent_calls(Callers(4, CPU), WORKLOAD, shared, BATCHES)
