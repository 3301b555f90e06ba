"""Order, bounds, and a clean end whichever stage fails and however the stages are delayed."""

import random
import threading
import time
from collections.abc import Callable, Generator

import pytest

from patience import PATIENCE_S
from redline.upscale.overlap import overlap

STAGES = ("read", "work", "write")


class Run:
    """Sends numbers through three stages that are slow at random and may fail at one of them."""

    def __init__(self, seed: int, items: int = 40, fail: tuple[str, int] | None = None, pause_s: float = 0.002) -> None:
        self.random = random.Random(seed)
        self.pauses = {stage: self.random.choice([0.0, pause_s]) for stage in STAGES}
        self.items, self.fail = items, fail
        self.read_count, self.most_ahead = 0, 0
        self.written: list[int] = []
        self.is_source_closed = False

    def step(self, stage: str, item: int) -> None:
        if self.pauses[stage]:
            time.sleep(self.random.random() * self.pauses[stage])
        if self.fail == (stage, item):
            raise ValueError(f"{stage} {item}")

    def read(self) -> Generator[int, None, None]:
        try:
            for item in range(self.items):
                self.step("read", item)
                self.read_count += 1
                self.most_ahead = max(self.most_ahead, self.read_count - len(self.written))
                yield item
        finally:
            self.is_source_closed = True

    def work(self, item: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        self.step("work", item)
        return item * item

    def write(self, item: int) -> None:
        self.step("write", round(item**0.5))
        self.written.append(item)

    def go(self, waiting: int = 2) -> None:
        before = threading.active_count()
        try:
            overlap(self.read(), self.work, self.write, waiting)
        finally:
            assert threading.active_count() <= before


@pytest.mark.parametrize("seed", range(8))
def test_everything_arrives_once_and_in_order(seed: int) -> None:
    run = Run(seed)
    run.go(waiting=1 + seed % 3)
    assert run.written == [item * item for item in range(40)] and run.is_source_closed


@pytest.mark.parametrize("waiting", [1, 3])
def test_reading_does_not_run_ahead(waiting: int) -> None:
    run = Run(0)
    run.pauses = {"read": 0.0, "work": 0.0, "write": 0.002}
    run.go(waiting)
    # Beside what waits before two stages, each of the three may hold one.
    assert waiting < run.most_ahead <= 2 * waiting + 3


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("item", [0, 1, 17, 39])
def test_a_failure_in_any_stage_ends_all_and_surfaces_once(stage: str, item: int) -> None:
    for seed in range(4):
        run = Run(seed, fail=(stage, item))
        with pytest.raises(ValueError, match=f"^{stage} {item}$"):
            run.go(waiting=1 + seed % 2)
        assert run.is_source_closed and run.written == [number * number for number in range(len(run.written))]
        # What was read before a failure to read is written.
        assert len(run.written) == item if stage == "read" else len(run.written) <= item


def test_all_stages_fail_at_once_and_one_is_raised() -> None:
    barrier = threading.Barrier(2)

    def read() -> Generator[int, None, None]:
        yield 0
        barrier.wait(PATIENCE_S)
        raise ValueError("read")

    def work(item: int) -> int:
        barrier.wait(PATIENCE_S)
        raise ValueError("work")

    with pytest.raises(ValueError, match="read|work"):
        overlap(read(), work, lambda item: None, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_is_not_swallowed(stage: str) -> None:
    def interrupted(_: int) -> int:
        raise KeyboardInterrupt

    def pass_on(item: int) -> int:
        return item

    def read() -> Generator[int, None, None]:
        for item in range(9):
            yield interrupted(item) if stage == "read" and item == 5 else item

    def write(item: int) -> None:
        interrupted(item) if stage == "write" else None

    work: Callable[[int], int] = interrupted if stage == "work" else pass_on
    with pytest.raises(KeyboardInterrupt):
        overlap(read(), work, write, 2)


def test_nothing_to_do() -> None:
    run = Run(0, items=0)
    run.go()
    assert run.written == []
