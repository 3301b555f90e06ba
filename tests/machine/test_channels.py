"""A waiting channel loses nothing, an overwriting one keeps the newest item; every drop is counted, no thread hangs."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from patience import PATIENCE_S
from redline.errors import RedlineError
from redline.machine.channels import Channel


def newest_only() -> Channel[int]:
    return Channel(1, overwrite_cause="overwritten")


KINDS = [newest_only, lambda: Channel(1), lambda: Channel(3)]


def pause(chance: random.Random) -> None:
    draw = chance.random()
    if draw < 0.1:
        time.sleep(chance.random() * 2e-3)
    elif draw < 0.4:
        time.sleep(0)


def in_threads(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"


def shuffled(channel: Channel[int], seed: int, count: int) -> list[int]:
    taken: list[int] = []

    def give() -> None:
        chance = random.Random(seed)
        for number in range(count):
            pause(chance)
            assert channel.put(number)
        channel.close()

    def receive() -> None:
        chance = random.Random(seed + 1000)
        while (item := channel.take()) is not None:
            taken.append(item)
            pause(chance)

    in_threads(give, receive)
    return taken


@pytest.mark.parametrize("seed", range(6))
def test_a_queue_loses_nothing_and_keeps_order(seed: int) -> None:
    queue = Channel[int](1 + seed % 3)
    assert shuffled(queue, seed, 120) == list(range(120)) and queue.dropped == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_slot_gives_the_newest_in_order_and_counts_the_rest(seed: int) -> None:
    slot = newest_only()
    taken = shuffled(slot, seed, 120)
    assert taken == sorted(set(taken)) and taken[-1] == 119
    assert len(taken) + slot.dropped == 120


def test_the_newest_wins() -> None:
    slot = newest_only()
    for number in range(3):
        assert slot.put(number)
    assert slot.take() == 2 and slot.dropped == 2 and slot.take(0.001) is None


def test_drops_are_told_with_their_cause() -> None:
    told: list[tuple[str, int]] = []
    slot = Channel[int](1, lambda cause, count: told.append((cause, count)), overwrite_cause="too slow")
    queue = Channel[int](3, lambda cause, count: told.append((cause, count)))
    for number in range(3):
        slot.put(number)
        queue.put(number)
    slot.take()
    slot.abandon()
    queue.abandon()
    assert told == [("too slow", 1), ("too slow", 1), ("stopped", 3)]


def test_a_full_queue_waits_for_room() -> None:
    queue = Channel[int](2)
    assert queue.put(1) and queue.put(2) and not queue.put(3, 0.001) and not queue.closed
    put = []
    giver = threading.Thread(target=lambda: put.append(queue.put(3)), daemon=True)
    giver.start()
    assert queue.take() == 1
    giver.join(PATIENCE_S)
    assert put == [True] and [queue.take(), queue.take()] == [2, 3] and queue.dropped == 0


@pytest.mark.parametrize("make", KINDS)
def test_what_is_in_a_closed_channel_can_still_be_taken(make: Callable[[], Channel[int]]) -> None:
    channel = make()
    channel.put(7)
    channel.close()
    assert not channel.put(8) and channel.take() == 7 and channel.take() is None and channel.dropped == 0


@pytest.mark.parametrize("make", KINDS)
def test_abandoning_drops_and_counts(make: Callable[[], Channel[int]]) -> None:
    channel = make()
    channel.put(7)
    channel.abandon()
    assert channel.take() is None and channel.dropped == 1 and channel.closed


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_the_end_wakes_all_who_wait(make: Callable[[], Channel[int]], end: str) -> None:
    channel = make()
    ended: list[int | None] = []

    def finish() -> None:
        time.sleep(0.01)
        getattr(channel, end)()

    in_threads(*[lambda: ended.append(channel.take())] * 3, finish)
    assert ended == [None] * 3


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_the_end_wakes_those_who_wait_for_room(end: str) -> None:
    queue = Channel[int](1)
    queue.put(0)
    put: list[bool] = []

    def finish() -> None:
        time.sleep(0.01)
        getattr(queue, end)()

    in_threads(*[lambda: put.append(queue.put(1))] * 3, queue.wait_for_room, finish)
    assert put == [False] * 3


def test_waiting_takes_no_processor_time() -> None:
    slot = newest_only()
    before = time.thread_time()
    assert slot.take(0.2) is None
    assert time.thread_time() - before < 0.05


def test_a_queue_for_nothing_is_refused() -> None:
    with pytest.raises(RedlineError, match=r"at least one item, not 0\.$"):
        Channel(0)
