"""Decoding with frame threads gives exactly the frames of the sequential decoder."""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import pytest
from av.codec.context import ThreadType

from redline.errors import RedlineError
from redline.stream.endpoints import EndpointOptions, open_source
from redline.stream.frames import Frame
from redline.stream.sources import video_file
from redline.stream.sources.video_file import VideoFile, _Progress
from redline.video import reading as films
from stream.clocks import ManualClock
from upscale.video.clips import make_clip, pattern

# Key frames every so often, and pictures that are shown in another order than they come in.
REORDERED = {"preset": "fast", "bf": "3", "g": "12", "crf": "20", "x264-params": "sliced-threads=0"}
AVI_CLOCK = {"time_base": Fraction(1, 25)}
FILMS: dict[str, dict[str, Any]] = {
    "intra.mp4": {"options": {"preset": "ultrafast", "g": "1", "crf": "5"}, "size": (160, 128)},
    "reordered.mp4": {"options": REORDERED},
    "reordered.mkv": {"options": REORDERED, "sound": "aac"},
    "reordered.flv": {"options": REORDERED},
    "broadcast.ts": {"options": REORDERED, "sound": "aac"},
    "open.mp4": {"options": {**REORDERED, "x264-params": "sliced-threads=0:open-gop=1:b-pyramid=normal"}},
    "plain.avi": {"options": {"preset": "ultrafast", "g": "12", "bf": "0"}, **AVI_CLOCK},
    "sound.avi": {"codec": "mpeg4", "sound": "mp3", **AVI_CLOCK},
    "pauses.avi": {"codec": "mpeg4", "pts": [*range(20), *range(50, 80), 300], **AVI_CLOCK},
    "uneven.mp4": {"options": REORDERED, "pts": [number * 512 + number % 7 * 50 for number in range(60)]},
    "one.mp4": {"frames": 1},
    "two.mkv": {"frames": 2},
    "hevc.mkv": {
        "codec": "libx265",
        "options": {"preset": "ultrafast", "crf": "8", "x265-params": "log-level=none:bframes=2"},
    },
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
}


def noisy(number: int, width: int, height: int) -> np.ndarray:
    """Frames whose packets are large enough to be damaged individually."""
    noise = np.random.default_rng(number).integers(-20, 20, (height, width, 1))
    return (pattern(number, width, height) + noise).clip(0, 255).astype(np.uint8)


@cache
def encoded(name: str) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        make_clip(path, **{"frames": 60, "size": (96, 64), "draw": noisy, **FILMS[name]})
        return path.read_bytes()


def make(path: Path) -> Path:
    path.write_bytes(encoded(path.name))
    return path


def outcome(path: Path, at_once: int, drop: bool = True) -> tuple[list[tuple], list[str], str]:
    """Returns the frames, the drops and the error."""
    given, left_out, said = list[tuple](), list[str](), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(films, "frame_threads", lambda: at_once)
        try:
            source = VideoFile(path, ManualClock(), left_out.append if drop else None)
            for frame in source.frames():
                pixels = hashlib.sha256(frame.pixels.numpy()).hexdigest()
                given.append((frame.index, frame.pts, frame.time_base, frame.duration, frame.pixels.shape, pixels))
        except RedlineError as error:
            said = str(error)
    return given, left_out, said


def assert_same_both_ways(path: Path, pixels: bool = True) -> tuple[list[str], str]:
    """Returns the drops, or the error if nothing may be skipped."""

    def seen(at_once: int, drop: bool) -> tuple[list[tuple], list[str], str]:
        given, left_out, said = outcome(path, at_once, drop)
        return given if pixels else [about[:-1] for about in given], left_out, said

    careful, strict = seen(1, drop=True), seen(1, drop=False)
    assert seen(4, drop=True) == careful
    assert seen(4, drop=False) == strict
    return careful[1], strict[2]


def pictures(path: Path) -> list[av.Packet]:
    with av.open(str(path)) as container:
        return [packet for packet in container.demux(container.streams.video[0]) if packet.size]


def damaged(path: Path, picture: int) -> None:
    """Damages a packet after its header."""
    data, packet = bytearray(path.read_bytes()), pictures(path)[picture]
    begin, end = packet.pos + 30, packet.pos + packet.size
    assert begin < end
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how many frames were yielded when the sequential decoder took over."""
    began, read_frames = list[int](), VideoFile._frames

    def frames(source: VideoFile, given: _Progress, is_threaded: bool) -> Iterator[Frame]:
        began.extend([] if is_threaded else [given.count])
        return read_frames(source, given, is_threaded)

    monkeypatch.setattr(VideoFile, "_frames", frames)
    return began


@pytest.mark.parametrize("name", list(FILMS))
def test_whole_videos_are_the_same_and_never_need_care(tmp_path: Path, name: str, careful: list[int]) -> None:
    path = make(tmp_path / name)
    given, left_out, said = outcome(path, at_once=4)
    assert not careful and not left_out and not said
    assert (given, left_out, said) == outcome(path, at_once=1)
    assert len(given) == {"one.mp4": 1, "two.mkv": 2, "pauses.avi": 51}.get(name, 60)


def test_a_trimmed_video_is_not_taken_for_damaged(tmp_path: Path, careful: list[int]) -> None:
    """Packets after the trimmed end are in the file, but are not shown."""
    path = make(tmp_path / "reordered.mp4")
    data = bytearray(path.read_bytes())
    lasts = data.index(b"elst") + 12
    data[lasts : lasts + 4] = (int.from_bytes(data[lasts : lasts + 4], "big") // 2).to_bytes(4, "big")
    path.write_bytes(data)
    given, left_out, said = outcome(path, at_once=4)
    assert not careful and not left_out and not said and 25 < len(given) < 35
    assert (given, left_out, said) == outcome(path, at_once=1)


def test_the_decoder_of_a_whole_video_works_on_several_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = list[Any]()
    monkeypatch.setattr(films, "cores", lambda: 16)
    monkeypatch.setattr(
        video_file,
        "enable_frame_threads",
        lambda stream: (streams.append(stream), films.enable_frame_threads(stream))[1],
    )
    for frame in VideoFile(make(tmp_path / "reordered.mp4")).frames():
        context = streams[0].codec_context
        assert (context.thread_type, context.thread_count) == (ThreadType.FRAME, 6), frame.index
    assert len(streams) == 1


@pytest.mark.parametrize(("cores", "at_once"), [(16, 6), (8, 4), (2, 1), (1, 0)])
def test_frames_at_once(monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int) -> None:
    monkeypatch.setattr(films, "cores", lambda: cores)
    assert films.frame_threads() == at_once


@pytest.mark.parametrize(("name", "codec"), [("a.ts", "mpeg2video"), ("a.mkv", "ffv1"), ("a.webm", "libvpx")])
def test_decoders_that_are_better_with_slices_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, careful: list[int], name: str, codec: str
) -> None:
    monkeypatch.setattr(films, "cores", lambda: 16)
    make_clip(tmp_path / name, frames=5, codec=codec, **AVI_CLOCK)
    assert len(list(VideoFile(tmp_path / name).frames())) == 5
    assert careful == [0]


@pytest.mark.parametrize("name", ["intra.mp4", "reordered.mp4", "reordered.mkv", "open.mp4", "sound.avi", "vp9.webm"])
@pytest.mark.parametrize("picture", [0, 1, 30, -3, -1])
def test_damage_is_reported_as_by_the_sequential_decoder(tmp_path: Path, name: str, picture: int) -> None:
    path = make(tmp_path / name)
    damaged(path, picture)
    left_out, said = assert_same_both_ways(path)
    # Small pictures that were made of others get over zeros at times; and before the first one nothing is told.
    assert left_out or name != "intra.mp4" or picture == 0
    assert bool(said) == bool(left_out)


@pytest.mark.parametrize("name", ["hevc.mkv", "reordered.flv"])
@pytest.mark.parametrize("picture", [0, 9, 30, -3, -1])
def test_unmarked_damage_only_spoils_pixels(tmp_path: Path, name: str, picture: int) -> None:
    """Damage that FFmpeg reports too late or never is returned as the threads decoded it."""
    path = make(tmp_path / name)
    damaged(path, picture)
    assert_same_both_ways(path, pixels=False)


@pytest.mark.parametrize("name", ["intra.mp4", "reordered.mkv"])
@pytest.mark.parametrize("pair", [(20, 50), (-3, -1), (0, -2), (40, 41)])
def test_damage_in_several_places_is_reported_once_each(tmp_path: Path, name: str, pair: tuple[int, int]) -> None:
    path = make(tmp_path / name)
    for picture in pair:
        damaged(path, picture)
    left_out, _ = assert_same_both_ways(path)
    assert name != "intra.mp4" or left_out == ["damaged"] * (2 - (0 in pair))


@pytest.mark.parametrize("name", ["reordered.mkv", "broadcast.ts", "plain.avi", "sound.avi"])
@pytest.mark.parametrize("tenths", [1, 5, 9])
def test_gaps_are_reported_as_by_the_sequential_decoder(tmp_path: Path, name: str, tenths: int) -> None:
    path = make(tmp_path / name)
    data = path.read_bytes()
    start = len(data) * tenths // 10
    for hole in (data[:start] + bytes(6000) + data[start + 6000 :], data[:start] + data[start + 6000 :]):
        path.write_bytes(hole[: len(data)])
        assert_same_both_ways(path)


@pytest.mark.parametrize("name", ["reordered.mkv", "broadcast.ts", "plain.avi", "reordered.flv"])
def test_videos_without_their_end_or_their_start(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / name)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    assert_same_both_ways(path)
    if path.suffix == ".ts":
        # Between two key frames.
        path.write_bytes(data[188 * 40 :])
        assert_same_both_ways(path)


def test_recordings_that_were_concatenated_with_another_size(tmp_path: Path) -> None:
    for name, size in (("a.ts", (64, 48)), ("b.ts", (96, 80))):
        make_clip(tmp_path / name, frames=20, size=size)
    (tmp_path / "both.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    assert assert_same_both_ways(tmp_path / "both.ts") == ([], "")
    assert len(outcome(tmp_path / "both.ts", at_once=4)[0]) == 40


def test_a_file_that_cannot_be_read_on_gives_all_frames_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(container: Any, stream: Any, name: str) -> Iterator[Any]:
        for number, packet in enumerate(container.demux()):
            if number == 40:
                raise RedlineError(f"{name!r} cannot be read to its end: Input/output error.")
            yield packet

    path = make(tmp_path / "reordered.mp4")
    monkeypatch.setattr("redline.stream.sources.video_file.packets", broken)
    _, said = assert_same_both_ways(path)
    assert "cannot be read to its end" in said and len(outcome(path, at_once=4)[0]) >= 35


def test_frame_threads_stop_before_a_spoiled_frame(tmp_path: Path, careful: list[int]) -> None:
    """Frames that depend on the damaged one may be shown before it."""
    path = make(tmp_path / "reordered.mp4")
    times = [packet.pts for packet in pictures(path)]
    place = next(place for place in range(30, 60) if times[place + 1] < times[place])
    damaged(path, place)
    assert outcome(path, at_once=4)[1]
    assert len(careful) == 1 and 20 < careful[0] <= sorted(times).index(min(times[place + 1 :]))


def test_frame_threads_stop_before_a_gap(tmp_path: Path, careful: list[int]) -> None:
    """The decoder continues with the frame before the gap, and AVI has no timestamps."""
    path = make(tmp_path / "sound.avi")
    places, data = [packet.pos for packet in pictures(path)], bytearray(path.read_bytes())
    data[places[30] - 8 : places[33] - 8] = bytes(places[33] - places[30])
    path.write_bytes(data)
    assert "missing" in outcome(path, at_once=4)[1]
    assert len(careful) == 1 and careful[0] <= 30


def test_a_frame_that_was_given_and_turns_out_to_be_damaged_is_reported_and_no_other_is_lost(tmp_path: Path) -> None:
    path = make(tmp_path / "reordered.mp4")
    whole = list(VideoFile(path).frames())
    damaged(path, 30)
    left_out = list[str]()
    rest = list(VideoFile(path, drop=left_out.append)._frames(_Progress(46, whole[45].pts), is_threaded=False))
    assert left_out == ["damaged"]
    assert [(frame.index, frame.pts) for frame in rest] == [(frame.index, frame.pts) for frame in whole[46:]]


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("picture", [5, 50])
def test_closing_ends_the_frames_in_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, picture: int
) -> None:
    monkeypatch.setattr(films, "frame_threads", lambda: at_once)
    path = make(tmp_path / "reordered.mp4")
    damaged(path, 30)
    source = VideoFile(path, drop=lambda cause: None)
    seen = 0
    for seen, _ in enumerate(source.frames(), start=1):
        if seen == picture:
            source.close()
    assert seen == picture


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_capture_time_is_when_the_frame_was_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """The time in the decoder, which reorders and works ahead, does not count."""
    monkeypatch.setattr(films, "frame_threads", lambda: at_once)
    clock, path = ManualClock(), make(tmp_path / "reordered.mp4")
    for frame in VideoFile(path, clock).frames():
        assert frame.captured_s == clock.now_s() == 100 + frame.index
        clock.pass_s(1)


@pytest.mark.parametrize("live", [False, True])
def test_a_video_that_is_looked_at_never_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, careful: list[int], live: bool
) -> None:
    """Otherwise viewers would wait while everything is decoded twice."""
    monkeypatch.setattr(films, "frame_threads", lambda: 4)
    path = make(tmp_path / "reordered.mp4")
    list(open_source(str(path), EndpointOptions(live=live)).frames())
    assert careful == ([0] if live else [])
