"""Transfers to the device and back: order, ownership and times."""

import time

import pytest
import torch

from redline.stream import transfers
from redline.stream.transfers import CudaTransfers, HostTransfers


def test_each_part_of_a_frames_way_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read before and after the copy in, after the work, and after the copy out."""
    readings = iter([10.0, 11.0, 14.0, 19.0])
    monkeypatch.setattr(transfers.time, "perf_counter", lambda: next(readings))
    way = HostTransfers(torch.zeros(3), torch.zeros(3))
    way.begin(torch.ones(3), lambda: None)
    fetched = way.finish()
    assert (fetched.copy_in_s, fetched.busy_s, fetched.copy_out_s) == (1.0, 3.0, 5.0)


def test_frames_come_back_in_the_order_in_which_they_were_sent() -> None:
    arriving, leaving = torch.zeros(3), torch.zeros(3)
    way = HostTransfers(arriving, leaving)
    for value in (1.0, 2.0):
        way.begin(torch.full((3,), value), lambda: leaving.copy_(arriving * 10))
    assert way.is_done()
    assert [way.finish().pixels.tolist() for _ in range(2)] == [[10.0] * 3, [20.0] * 3]


@pytest.mark.gpu
def test_on_a_gpu_times_are_seconds_and_frames_keep_their_order() -> None:
    arriving, leaving = torch.zeros(256, 1024, device="cuda"), torch.zeros(256, 1024, device="cuda")
    way = CudaTransfers(arriving, leaving, torch.cuda.Stream())
    began_s = time.perf_counter()
    for value in (1.0, 2.0):
        way.begin(torch.full((256, 1024), value), lambda: leaving.copy_(arriving * 10))
    frames = [way.finish() for _ in range(2)]
    passed_s = time.perf_counter() - began_s
    assert [float(frame.pixels.unique()) for frame in frames] == [10.0, 20.0]
    for frame in frames:
        assert 0 < frame.copy_in_s < passed_s and 0 < frame.busy_s < passed_s and 0 < frame.copy_out_s < passed_s
