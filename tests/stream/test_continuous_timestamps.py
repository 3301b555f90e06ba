"""Timestamps of concatenated recordings become continuous."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from redline.stream.continuous_timestamps import ContinuousTimestamps


def packet(dts: int | None, stream: int = 0, duration: int | None = 10, corrupt: bool = False) -> Any:
    """Times are in hundredths of a second; pts is dts + 2."""
    return SimpleNamespace(
        dts=dts,
        pts=None if dts is None else dts + 2,
        duration=duration,
        time_base=Fraction(1, 100),
        stream=SimpleNamespace(index=stream),
        is_corrupt=corrupt,
    )


def moved(joined: ContinuousTimestamps, *packets: Any) -> list[int | None]:
    for one in packets:
        joined.shift(one)
        assert one.pts is None or one.dts is None or one.pts - one.dts == 2
    return [one.dts for one in packets]


def test_the_next_recording_begins_where_the_last_one_ended() -> None:
    times = moved(ContinuousTimestamps("mpegts"), packet(100), packet(110), packet(50), packet(60), packet(5))
    assert times == [100, 110, 120, 130, 140]


def test_equal_times_and_other_containers_are_not_shifted() -> None:
    assert moved(ContinuousTimestamps("mpegts"), packet(100), packet(100)) == [100, 100]
    assert moved(ContinuousTimestamps("mov"), packet(100), packet(50)) == [100, 50]


def test_all_streams_are_shifted_by_the_same_amount() -> None:
    joined = ContinuousTimestamps("mpegts")
    assert moved(joined, packet(100), packet(104, stream=1), packet(50)) == [100, 104, 114]
    # The other stream gets there a packet later, and a third one begins in the new recording.
    assert moved(joined, packet(110, stream=1), packet(52, stream=1), packet(54, stream=2)) == [110, 116, 118]


def test_a_stream_that_pauses_at_the_boundary_is_shifted_too() -> None:
    joined = ContinuousTimestamps("mpegts")
    assert moved(joined, packet(100), packet(20, stream=1), packet(110), packet(10)) == [100, 20, 110, 120]
    # Without falling: it rests for exactly a second, which may be the same recording, and for more, which may not.
    assert moved(joined, packet(120, stream=1)) == [120]
    assert moved(joined, packet(221, stream=1)) == [331]


def test_a_corrupt_packet_starts_no_new_recording() -> None:
    joined = ContinuousTimestamps("mpegts")
    assert moved(joined, packet(100), packet(3, corrupt=True), packet(110)) == [100, 3, 110]
    assert moved(joined, packet(0), packet(5, corrupt=True), packet(7, stream=3, corrupt=True)) == [120, 125, 127]


def test_a_packet_without_times_is_left_alone_and_one_without_a_length_counts_as_short() -> None:
    assert moved(ContinuousTimestamps("mpeg"), packet(None), packet(100, duration=None), packet(50)) == [None, 100, 100]
