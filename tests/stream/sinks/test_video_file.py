"""Video files keep the times of frames and audio, and are complete or absent."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import pytest
import torch

from redline.errors import RedlineError
from redline.files.partial import hidden_path, recording_path, remove_abandoned
from redline.stream.frames import Frame
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from upscale.video.clips import make_clip


def clip(ticks: list[int], time_base: Fraction, height: int = 34, width: int = 50) -> list[Frame]:
    frames = SyntheticClip(height, width, count=len(ticks), seed=len(ticks)).frames()
    return [Frame(frame.pixels, frame.index, pts, time_base, 0.0) for frame, pts in zip(frames, ticks, strict=True)]


def write(sink: VideoFileSink, frames: list[Frame], whole: bool = True) -> None:
    for frame in frames:
        sink.write(frame)
    sink.close(whole)


def sound_of(path: Path) -> list[tuple[Fraction, bytes]]:
    with av.open(str(path)) as container:
        packets = list(container.demux(audio=0))
    return [(packet.pts * packet.time_base, bytes(packet)) for packet in packets if packet.size]


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("size", [(132, 200), (33, 47), (1, 1)])
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str, size: tuple[int, int]) -> None:
    frames = clip([0, 40, 80, 120, 160], Fraction(1, 1000), *size)
    target = tmp_path / f"a{suffix}"
    write(VideoFileSink(target, Fraction(25), crf=4), frames)
    back = list(VideoFile(target).frames())
    assert [frame.time_s for frame in back] == [frame.time_s for frame in frames]
    for frame, original in zip(back, frames, strict=True):
        assert frame.pixels.shape == original.pixels.shape
        assert (frame.pixels.float() - original.pixels.float()).abs().mean() < 2
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.parametrize(
    ("ticks", "time_base"),
    [
        ([0, 1, 2, 3, 4, 5], Fraction(1001, 30000)),
        ([0, 512, 513, 4000, 4100, 9999], Fraction(1, 12800)),
        ([7, 3000, 3001, 12345], Fraction(1, 90000)),
        ([5, 6, 100_000, 100_007], Fraction(1, 1_000_000)),
    ],
)
def test_uneven_times_are_kept_to_the_tick(tmp_path: Path, ticks: list[int], time_base: Fraction) -> None:
    frames = clip(ticks, time_base)
    write(VideoFileSink(tmp_path / "a.mp4", Fraction(25)), frames)
    assert [f.time_s for f in VideoFile(tmp_path / "a.mp4").frames()] == [f.time_s for f in frames]


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("is_live", [True, False])
def test_live_times_start_at_zero(tmp_path: Path, is_live: bool, suffix: str) -> None:
    frames = clip([1_000_000, 1_000_040, 1_000_090], Fraction(1, 1000))
    film = tmp_path / f"a{suffix}"
    write(VideoFileSink(film, Fraction(25), origin_s=None, is_live=is_live), frames)
    assert [f.time_s for f in VideoFile(film).frames()] == [0, Fraction(4, 100), Fraction(9, 100)]


@contextmanager
def small_disk(most_bytes: int) -> Iterator[None]:
    """Limits the file size, so that writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("is_live", [True, False])
def test_a_full_disk_does_not_take_a_live_recording_away(tmp_path: Path, is_live: bool, suffix: str) -> None:
    """A live recording cannot be repeated, so it is kept; other files are complete or absent."""
    film, noise = tmp_path / f"a{suffix}", torch.Generator().manual_seed(0)
    sink = VideoFileSink(film, Fraction(5), is_live=is_live)
    with small_disk(400_000), pytest.raises(RedlineError, match=r"^cannot write '.*': File too large") as caught:
        for index in range(400):
            pixels = torch.randint(0, 256, (96, 96, 3), dtype=torch.uint8, generator=noise)
            sink.write(Frame(pixels, index, index, Fraction(1, 5), 0.0))
        sink.close()
    sink.abandon()
    assert str(caught.value).endswith("the recording up to then is kept.") == is_live
    assert [path.name for path in tmp_path.iterdir()] == ([film.name] if is_live else [])
    if is_live:
        seen = [frame.time_s for frame in VideoFile(film).frames()]
        assert len(seen) > 10 and seen == [Fraction(index, 5) for index in range(len(seen))]


def test_a_recording_that_has_no_frame_yet_is_not_kept(tmp_path: Path) -> None:
    sink = VideoFileSink(tmp_path / "a.mp4", Fraction(25), is_live=True)
    with small_disk(100), pytest.raises(RedlineError, match=r"^cannot write '.*': File too large\.$"):
        write(sink, clip([0, 1, 2], Fraction(1, 25)))
    sink.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("is_live", [True, False])
def test_audio_is_copied_in_step(tmp_path: Path, is_live: bool, suffix: str) -> None:
    make_clip(tmp_path / "in.mp4", frames=25, sound="aac")
    source = VideoFile(tmp_path / "in.mp4")
    target = tmp_path / f"out{suffix}"
    sink = VideoFileSink(target, source.rate, origin_s=source.origin_s, audio=source.path, is_live=is_live)
    write(sink, list(source.frames()))
    before, after = sound_of(tmp_path / "in.mp4"), sound_of(target)
    assert [data for _, data in after] == [data for _, data in before] and len(after) > 40
    for (was, _), (now, _) in zip(before, after, strict=True):
        assert abs(now - was) <= (0 if suffix == ".mp4" else Fraction(1, 1000))
    assert [f.time_s for f in VideoFile(target).frames()] == [f.time_s for f in source.frames()]


def test_audio_of_a_broadcast_stays_in_step_when_its_clock_is_taken_off(tmp_path: Path) -> None:
    make_clip(tmp_path / "in.ts", frames=25, sound="mp2")
    source = VideoFile(tmp_path / "in.ts")
    write(
        VideoFileSink(tmp_path / "out.mkv", source.rate, origin_s=source.origin_s, audio=source.path),
        frames := list(source.frames()),
    )
    gap = sound_of(tmp_path / "in.ts")[0][0] - frames[0].time_s
    written = list(VideoFile(tmp_path / "out.mkv").frames())
    assert abs(sound_of(tmp_path / "out.mkv")[0][0] - written[0].time_s - gap) <= Fraction(1, 1000)
    assert written[0].time_s < 0.1 and source.origin_s > 0


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_recordings_that_were_concatenated_follow_each_other_with_their_audio(tmp_path: Path, suffix: str) -> None:
    """`cat in.ts in.ts`: the timestamps of audio and video start again."""
    make_clip(tmp_path / "in.ts", frames=25, sound="mp2", options={"bf": "0"})
    (tmp_path / "two.ts").write_bytes(2 * (tmp_path / "in.ts").read_bytes())
    alone, source = list(VideoFile(tmp_path / "in.ts").frames()), VideoFile(tmp_path / "two.ts")
    frames, target = list(source.frames()), tmp_path / f"out{suffix}"
    write(VideoFileSink(target, source.rate, origin_s=source.origin_s, audio=source.path), frames)
    written, sound = [f.time_s for f in VideoFile(target).frames()], [at for at, _ in sound_of(target)]
    step, slack = alone[1].time_s - alone[0].time_s, Fraction(1, 500)
    assert len(written) == 50 and all(abs(b - a - step) <= slack for a, b in pairwise(written[25:]))
    # Where they meet there is as much time as what of the first lasts longer, its pictures or its sound.
    assert step - slack <= written[25] - written[24] <= 4 * step
    gaps = [Fraction(sound[len(sound) // 2 * part] - written[25 * part]) for part in (0, 1)]
    assert abs(gaps[0] - gaps[1]) <= slack and all(a < b for a, b in pairwise(sound))


def test_the_last_frame_lasts_as_long_as_it_did(tmp_path: Path) -> None:
    for suffix in (".mp4", ".mkv"):
        ticks, lasts = [0, 2000, 2100, 6000], [2000, 100, 3900, 33]
        frames = [replace(f, duration=long) for f, long in zip(clip(ticks, Fraction(1, 1000)), lasts, strict=True)]
        write(VideoFileSink(tmp_path / f"a{suffix}", Fraction(1)), frames)
        with av.open(str(tmp_path / f"a{suffix}")) as container:
            assert abs(container.duration / av.time_base - 6.033) < 0.002, suffix


def test_a_video_that_was_stopped_ends_with_its_frames(tmp_path: Path) -> None:
    make_clip(tmp_path / "in.mp4", frames=50, sound="aac")
    source = VideoFile(tmp_path / "in.mp4")
    sink = VideoFileSink(tmp_path / "o.mp4", source.rate, audio=source.path)
    write(sink, list(source.frames())[:10], whole=False)
    assert Fraction(37, 100) < sound_of(tmp_path / "o.mp4")[-1][0] < Fraction(4, 10)


def test_an_abandoned_video_leaves_no_trace_and_the_old_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "a.mp4"
    target.write_bytes(b"old")
    sink = VideoFileSink(target, Fraction(25))
    for frame in clip([0, 1, 2], Fraction(1, 25)):
        sink.write(frame)
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2
    sink.abandon()
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_stream_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = hidden_path(tmp_path / "b.mp4")
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: gone.pid)
        left = hidden_path(tmp_path / "a.mp4")
    for path in (left, mine):
        path.touch()
    write(VideoFileSink(tmp_path / "a.mp4", Fraction(25)), clip([0, 1], Fraction(1, 25)))
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "a.mp4"])


RECORD = """
import sys
from fractions import Fraction
from pathlib import Path
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources.synthetic import SyntheticClip

for case in sys.argv[2:]:
    rate, seconds = map(int, case.split("-"))
    folder = Path(sys.argv[1]) / case
    sinks = [VideoFileSink(folder / name, Fraction(rate), is_live=True) for name in ("a.mp4", "b.mov", "c.mkv")]
    for frame in SyntheticClip(34, 50, count=seconds * rate, rate=Fraction(rate)).frames():
        for sink in sinks:
            sink.write(frame)
print("recorded", flush=True)
sys.stdin.read()
"""


def test_a_killed_recording_loses_at_most_two_seconds_and_is_kept_by_the_next(tmp_path: Path) -> None:
    # A slow model gives few frames, and none of them may wait in the encoder; a short recording is on the disk too.
    cases = ["25-7", "2-5", "25-2"]
    for case in cases:
        (tmp_path / case).mkdir()
    command = [sys.executable, "-c", RECORD, str(tmp_path), *cases]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"recorded\n"
        for case in cases:
            recording = sorted((tmp_path / case).iterdir())
            assert VideoFileSink(tmp_path / case / "d.mp4", Fraction(25)).notes == ()
            assert len(recording) == 3 and sorted((tmp_path / case).iterdir()) == recording, "it is still at work"
        child.kill()
    for case in cases:
        folder, (rate, seconds) = tmp_path / case, map(int, case.split("-"))
        (folder / "a.recovered.mp4").write_bytes(b"another")
        remove_abandoned(folder)
        notes = VideoFileSink(folder / "a.mp4", Fraction(25)).notes
        kept = ["a.recovered-2.mp4", "b.recovered.mov", "c.recovered.mkv"]
        assert notes == tuple(f"recovered {name!r}, a recording whose process was killed." for name in kept)
        assert sorted(path.name for path in folder.iterdir()) == sorted(["a.recovered.mp4", *kept])
        for name in kept:
            times = [frame.time_s for frame in VideoFile(folder / name).frames()]
            assert times == [Fraction(index, rate) for index in range(len(times))]
            assert seconds - len(times) / rate <= 2, (name, rate, len(times))


def left_by_killed(path: Path, monkeypatch: pytest.MonkeyPatch, process: int = 2**22 + 1) -> Path:
    """Returns the file name of an old process's recording; by default its process id is unused."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process)
        patched.setattr("redline.files.partial._start_time", lambda process: "1")
        return recording_path(path)


def test_a_killed_recording_without_a_frame_is_deleted_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_by_killed(tmp_path / "a.mp4", monkeypatch)
    left.write_bytes(bytes(88))
    notes = VideoFileSink(tmp_path / "a.mp4", Fraction(25)).notes
    assert notes == (f"deleted {left.name!r}, a recording whose process was killed before its first frame.",)
    assert list(tmp_path.iterdir()) == []


def test_only_recordings_are_recovered_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, folder = tmp_path / "outside.mp4", tmp_path / "folder"
    make_clip(outside, frames=3, muxer={"movflags": "+faststart"})
    outside.write_bytes(outside.read_bytes() + b"appended")
    before = outside.read_bytes()
    folder.mkdir()
    left_by_killed(folder / "notes.txt", monkeypatch).write_text("notes")
    left_by_killed(folder / "link.mp4", monkeypatch).symlink_to(outside)
    os.mkfifo(left_by_killed(folder / "pipe.mp4", monkeypatch))
    found = sorted(folder.iterdir())
    assert VideoFileSink(folder / "a.mp4", Fraction(25)).notes == ()
    assert sorted(folder.iterdir()) == found and outside.read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell when a process began")
def test_a_recording_of_an_earlier_process_of_the_same_number_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a container restarts, the stream has process id 1 again."""
    make_clip(left_by_killed(tmp_path / "a.mp4", monkeypatch, os.getpid()), frames=3)
    recording_path(tmp_path / "b.mp4").touch()
    notes = VideoFileSink(tmp_path / "a.mp4", Fraction(25)).notes
    assert notes == ("recovered 'a.recovered.mp4', a recording whose process was killed.",)
    assert len(list(tmp_path.iterdir())) == 2, "this process still writes the other"


def test_without_a_frame_nothing_is_written(tmp_path: Path) -> None:
    VideoFileSink(tmp_path / "a.mp4", Fraction(25)).close()
    assert list(tmp_path.iterdir()) == []


def test_another_size_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    sink = VideoFileSink(tmp_path / "a.mp4", Fraction(25))
    sink.write(clip([0], Fraction(1, 25))[0])
    with pytest.raises(RedlineError, match=r"^the frame size changes to 6×8, but the video is 50×34\.$"):
        sink.write(clip([1], Fraction(1, 25), 8, 6)[0])
    sink.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, packet: object) -> None:
        raise OSError(28, "No space left on device")

    sink = VideoFileSink(tmp_path / "a.mp4", Fraction(25))
    monkeypatch.setattr("redline.stream.sinks.video_file._VideoWriter._mux", full)
    with pytest.raises(RedlineError, match=r"^cannot write '.*a\.mp4': No space left on device\.$"):
        for frame in clip(list(range(5)), Fraction(1, 25)):
            sink.write(frame)
    sink.abandon()
    assert list(tmp_path.iterdir()) == []


def test_impossible_places_are_refused_before_anything_starts(tmp_path: Path) -> None:
    def sentence(path: Path, audio: Path | None = None) -> str:
        with pytest.raises(RedlineError) as caught:
            VideoFileSink(path, Fraction(25), audio=audio)
        return str(caught.value)

    assert "unknown video format 'a.avi'" in sentence(tmp_path / "a.avi")
    assert "its folder does not exist" in sentence(tmp_path / "none" / "a.mp4")
    (tmp_path / "d.mp4").mkdir()
    assert sentence(tmp_path / "d.mp4").endswith("it is a folder.")
    assert "does not exist." in sentence(tmp_path / "a.mp4", tmp_path / "none.mp4")
    make_clip(tmp_path / "f.mkv", frames=5, sound="flac")
    assert "it is the source" in sentence(tmp_path / "f.mkv", tmp_path / "f.mkv")
    make_clip(tmp_path / "v.mkv", frames=5, sound="libopus")
    assert sentence(tmp_path / "a.mov", tmp_path / "v.mkv") == (
        ".mov does not support the audio of 'v.mkv' (opus): write a .mkv file."
    )


def test_times_that_stand_still_are_moved_on(tmp_path: Path) -> None:
    write(VideoFileSink(tmp_path / "a.mp4", Fraction(25)), clip([0, 0, 5, 3], Fraction(1, 100)))
    assert [f.time_s * 100 for f in VideoFile(tmp_path / "a.mp4").frames()] == [0, 1, 5, 6]
    assert torch.is_tensor(next(VideoFile(tmp_path / "a.mp4").frames()).pixels)
