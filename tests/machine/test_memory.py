import io
import mmap
import threading
from pathlib import Path

import pytest
import torch

from redline.errors import MachineError, RedlineError
from redline.machine import memory
from redline.machine.host_memory import available_host_bytes, host_bytes
from redline.machine.memory import MemoryMonitor, MemoryPool, PerformanceTracker

MEGABYTE = 2**20


def test_the_peak_is_reported_after_memory_is_freed() -> None:
    with MemoryMonitor("cpu") as monitor:
        before = monitor.current_bytes
        # Maps pages directly, because an allocator may keep the memory of a freed tensor.
        with mmap.mmap(-1, 64 * MEGABYTE) as large:
            large.write(b"x" * (64 * MEGABYTE))
            during = monitor.current_bytes
    assert during - before > 48 * MEGABYTE
    assert monitor.current_bytes < during - 48 * MEGABYTE
    assert monitor.peak_bytes >= during


def test_the_peak_is_at_least_every_earlier_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts pages per thread, and updates the peak only from time to time."""
    monitor = MemoryMonitor("cpu")
    held = iter((700, 500, 500))
    monkeypatch.setattr(memory, "resident_bytes", lambda: next(held))
    monkeypatch.setattr(memory, "peak_resident_bytes", lambda: 690)
    monkeypatch.setattr(monitor, "_polled_peak", None)
    assert monitor.read().peak_bytes == 700
    assert monitor.read().peak_bytes == 700
    monitor._highest_read = 0
    assert monitor.read().peak_bytes == 690


def test_a_new_monitor_resets_the_peak() -> None:
    with MemoryMonitor("cpu") as monitor, mmap.mmap(-1, 96 * MEGABYTE) as large:
        large.write(b"x" * (96 * MEGABYTE))
    high = monitor.peak_bytes
    with MemoryMonitor("cpu") as monitor:
        pass
    assert monitor.peak_bytes < high - 64 * MEGABYTE


def test_a_thread_polls_if_the_peak_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reset_peak_resident", lambda: False)
    monkeypatch.setattr(memory, "peak_resident_bytes", lambda: 10**15)
    with MemoryMonitor("cpu", interval_s=0.001) as monitor, mmap.mmap(-1, 64 * MEGABYTE) as large:
        large.write(b"x" * (64 * MEGABYTE))
        threading.Event().wait(0.1)
        held = monitor.current_bytes
    assert held - MEGABYTE <= monitor.peak_bytes < 10**15
    assert not any(thread.name == "memory monitor" for thread in threading.enumerate())


def test_the_line_it_logs() -> None:
    out = io.StringIO()
    line = MemoryMonitor("cpu").log_memory("after step 3", out)
    assert out.getvalue() == line + "\n"
    assert line.startswith("after step 3: cpu: ") and "at the peak" in line
    assert MemoryMonitor("cpu").read().fragmentation_bytes == 0


def test_an_unknown_device() -> None:
    with pytest.raises(MachineError):
        MemoryMonitor("tpu")


def test_available_memory_is_below_total_memory() -> None:
    assert 0 < available_host_bytes() <= host_bytes()


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text
    said = {"max": "3000000\n", "current": "1000000\n", "stat": "inactive_file 0\n"}
    fake = {f"/sys/fs/cgroup/memory.{name}": text for name, text in said.items()}

    def read(self: Path, *args: object, **kwargs: object) -> str:
        return fake.get(str(self)) or real(self)

    monkeypatch.setattr(Path, "read_text", read)
    assert available_host_bytes() == 2_000_000
    fake["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_host_bytes() > 2_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_throughput_over_a_sliding_window() -> None:
    clock = Clock()
    tracker = PerformanceTracker(window_s=10.0, clock=clock)
    assert tracker.throughput == 0.0
    clock.now += 50  # loading a model does not count as a step
    tracker.start()
    for _ in range(10):
        clock.now += 1
        tracker.update(4)
    assert tracker.throughput == pytest.approx(4.0) and tracker.mean_throughput == pytest.approx(4.0)
    for _ in range(40):
        clock.now += 0.5
        tracker.update(4)
    assert tracker.throughput == pytest.approx(8.0), "the slow steps have left the window"
    assert tracker.mean_throughput == pytest.approx((40 + 160) / 30)
    assert tracker.items == 200


def test_without_start_the_first_update_starts_the_clock() -> None:
    clock = Clock()
    tracker = PerformanceTracker(clock=clock)
    tracker.update(1000)
    assert tracker.throughput == 0.0 and tracker.items == 0
    clock.now += 2
    tracker.update(6)
    assert tracker.throughput == pytest.approx(3.0)


def test_one_step_longer_than_the_window_still_counts() -> None:
    clock = Clock()
    tracker = PerformanceTracker(window_s=1.0, clock=clock)
    tracker.start()
    for _ in range(3):
        clock.now += 5
        tracker.update(10)
    assert tracker.throughput == pytest.approx(2.0)
    with pytest.raises(RedlineError):
        PerformanceTracker(window_s=0)


def test_no_buffer_is_lent_twice() -> None:
    pool = MemoryPool("cpu")
    one, two = pool.take((3, 5)), pool.take((3, 5))
    assert one.data_ptr() != two.data_ptr()
    assert pool.misses == 2 and pool.hits == 0 and pool.lent == 2
    pointer = one.data_ptr()
    pool.give_back(one)
    again = pool.take((3, 5))
    assert again.data_ptr() == pointer and pool.hits == 1
    assert pool.take((3, 5)).data_ptr() not in (pointer, two.data_ptr())


def test_give_back_refuses_buffers_that_are_not_lent() -> None:
    pool = MemoryPool("cpu")
    buffer = pool.take((2,))
    pool.give_back(buffer)
    with pytest.raises(RedlineError, match="not lent"):
        pool.give_back(buffer)
    with pytest.raises(RedlineError, match="not lent"):
        pool.give_back(torch.empty(2))


def test_shapes_and_dtypes_are_kept_apart() -> None:
    pool = MemoryPool("cpu", torch.float16)
    pool.give_back(pool.take((4, 2)))
    assert pool.take((2, 4)).shape == (2, 4) and pool.hits == 0
    assert pool.take((4, 2), torch.float32).dtype == torch.float32 and pool.hits == 0
    assert pool.take((4, 2)).dtype == torch.float16 and pool.hits == 1
    assert pool.bytes == 8 * 2 + 8 * 2 + 8 * 4


def test_reserved_buffers_are_hits_and_lend_gives_back_after_an_error() -> None:
    pool = MemoryPool("cpu")
    pool.reserve((7,), count=2)
    assert pool.bytes == 2 * 7 * 4
    with pytest.raises(ValueError, match="inside"), pool.lend((7,)):
        assert pool.lent == 1
        raise ValueError("inside")
    assert pool.lent == 0 and pool.hits == 1 and pool.misses == 0
    pool.clear()
    assert pool.bytes == 0


def test_threads_never_share_a_buffer() -> None:
    pool = MemoryPool("cpu")
    clashes: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            with pool.lend((64,)) as buffer:
                buffer.fill_(mark)
                if not bool((buffer == mark).all()):
                    clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes and pool.misses <= 4 and pool.hits + pool.misses == 800


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.cuda.empty_cache()
    with MemoryMonitor("cuda") as monitor:
        start = monitor.current_bytes
        large = torch.ones(64 * MEGABYTE // 4, device="cuda")
        assert monitor.current_bytes - start == 64 * MEGABYTE
        del large
        reading = monitor.read()
    assert reading.current_bytes == start and reading.peak_bytes == start + 64 * MEGABYTE
    assert reading.fragmentation_bytes >= 64 * MEGABYTE
    assert "held unused" in monitor.log_memory(file=io.StringIO())
    pool = MemoryPool("cuda", torch.bfloat16)
    assert pool.take((3,)).device.type == "cuda"
