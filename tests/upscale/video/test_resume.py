"""A run that is killed goes on where it was, and what comes out is what an unbroken run gives."""

import json
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.container import OutputContainer
from torch import Tensor

from redline.errors import RedlineError
from redline.upscale.video import parts as writer
from redline.upscale.video import remux
from redline.upscale.video.parts import notes_on_parts, part_end_after
from redline.upscale.video.settings import VideoProgress
from upscale.video.clips import FAST, doubled, make_clip, shown, upscale

FRAMES, SEGMENT = 31, 6
# A video with B-frames and uneven steps, so that decode times, time stamps and seeking all matter.
PTS = [number * 512 + (number * number * 37) % 300 for number in range(FRAMES)]


SETTINGS = {"segment_frames": SEGMENT}


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it on purpose."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    make_clip(path, pts=PTS, sound="aac", options={**FAST, "g": "11"})
    return path


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, Path]:
    """What unbroken runs give, by codec."""
    made = {"h264": source.with_name("whole.mp4"), "ffv1": source.with_name("whole.mkv")}
    for codec, target in made.items():
        upscale(source, target, **settings_for(codec))
    return made


def settings_for(codec: str) -> dict:
    return {**SETTINGS, "codec": codec}


def stopping_at(frame: int):
    seen = 0

    def enlarge(batch: Tensor) -> Tensor:
        nonlocal seen
        seen += len(batch)
        if seen > frame:
            raise Killed
        return doubled(batch)

    return enlarge


def counting():
    seen: list[int] = []

    def enlarge(batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return doubled(batch)

    return enlarge, seen


def parts(folder: Path, name: str = "b.mp4") -> Path:
    return folder / f".{name}.redline-parts"


def same(one: Path, other: Path) -> bool:
    pairs = list(zip(shown(one), shown(other), strict=True))
    return all(a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in pairs) and len(pairs) == FRAMES


@pytest.mark.parametrize(
    ("codec", "stops"), [*(("h264", stops) for stops in ([0], [6], [7], [30], [18, 1, 12])), ("ffv1", [13, 9])]
)
def test_a_stopped_run_goes_on_and_gives_the_same_film(
    tmp_path: Path, source: Path, whole: dict[str, Path], codec: str, stops: list[int]
) -> None:
    settings = settings_for(codec)
    target = tmp_path / f"b{whole[codec].suffix}"
    for stop in stops:
        with pytest.raises(Killed):
            upscale(source, target, enlarge=stopping_at(stop), resume=True, **settings)
        assert not target.exists() and parts(tmp_path, target.name).exists()
    enlarge, seen = counting()
    result = upscale(source, target, enlarge=enlarge, resume=True, **settings)
    assert same(target, whole[codec]) and result.frames == FRAMES == result.frames_resumed + sum(seen)
    assert result.frames_resumed % SEGMENT == 0 and not parts(tmp_path, target.name).exists()
    # A few frames were on their way to the encoder.
    assert result.frames_resumed >= (stops[0] - 12) // SEGMENT * SEGMENT


def test_a_short_video_is_resumed_too(tmp_path: Path, source: Path) -> None:
    """One that is shorter than the usual part; what comes out is the same in any case."""
    upscale(source, tmp_path / "whole.mp4")
    with pytest.raises(Killed):
        upscale(source, tmp_path / "b.mp4", enlarge=stopping_at(29))
    enlarge, seen = counting()
    result = upscale(source, tmp_path / "b.mp4", enlarge=enlarge, resume=True)
    assert result.frames_resumed == 24 and sum(seen) == FRAMES - 24
    assert same(tmp_path / "b.mp4", tmp_path / "whole.mp4")


def test_parts_grow_with_what_is_done() -> None:
    ends = [0]
    while ends[-1] < 2000:
        ends.append(part_end_after(ends[-1], 250))
    assert ends[:7] == [0, 12, 24, 36, 54, 81, 121] and ends[-1] - ends[-2] == 250
    # A stop costs a third at most, once something is done.
    assert all(end - begin <= end / 3 + 1 for begin, end in zip(ends[2:], ends[3:], strict=False))
    assert part_end_after(6, 6) == 12


@pytest.mark.parametrize("error", [RedlineError("no"), KeyboardInterrupt()])
def test_a_failure_before_the_first_part_leaves_nothing(error: BaseException, tmp_path: Path, source: Path) -> None:
    def fail(batch: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)):
        upscale(source, tmp_path / "b.mp4", enlarge=fail, **SETTINGS)
    assert list(tmp_path.iterdir()) == []


CHILD = """
import sys
from pathlib import Path
from upscale.video.clips import doubled, finishing
from redline.upscale.video.settings import VideoSettings
from redline.upscale.video.run import upscale_video

source, target = map(Path, sys.argv[1:])
settings = VideoSettings(segment_frames=6, resume=True)
upscale_video(source, target, finishing(doubled), 2, settings, lambda progress: input(f"{progress.frames_done}\\n"))
"""


def test_kill_minus_9(tmp_path: Path, source: Path, whole: dict[str, Path]) -> None:
    tests = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), str(tmp_path / "b.mp4")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]), "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    # The child waits for a line after every frame.
    while int(child.stdout.readline() or 99) < 14:
        child.stdin.write("\n")
        child.stdin.flush()
    for resume in (False, True):  # as long as the child is there, its parts are its own
        with pytest.raises(RedlineError, match="another run is writing"):
            upscale(source, tmp_path / "b.mp4", resume=resume, **SETTINGS)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL and not (tmp_path / "b.mp4").exists()
    assert {"part-000000.mkv", "part-000000.json"} <= {path.name for path in parts(tmp_path).iterdir()}
    result = upscale(source, tmp_path / "b.mp4", resume=True, **SETTINGS)
    assert result.frames_resumed >= 12
    assert same(tmp_path / "b.mp4", whole["h264"])


@pytest.fixture
def stopped(tmp_path: Path, source: Path) -> Path:
    """The video, after a run that was stopped with two parts done at least."""
    with pytest.raises(Killed):
        upscale(source, tmp_path / "b.mp4", enlarge=stopping_at(26), **SETTINGS)
    assert finished_parts(tmp_path) >= 2
    return source


def finished_parts(tmp_path: Path) -> int:
    return len(list(parts(tmp_path).glob("*.json"))) - 1


def test_a_run_killed_while_joining_does_nothing_again(
    tmp_path: Path, source: Path, whole: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(remux, "_lost_tags", killed)
        upscale(source, tmp_path / "b.mp4", **SETTINGS)
    enlarge, seen = counting()
    result = upscale(source, tmp_path / "b.mp4", enlarge=enlarge, resume=True, **SETTINGS)
    assert seen == [] and result.frames_resumed == FRAMES
    assert same(tmp_path / "b.mp4", whole["h264"])


def test_without_resume_parts_are_discarded(tmp_path: Path, stopped: Path) -> None:
    assert upscale(stopped, tmp_path / "b.mp4", **SETTINGS).frames_resumed == 0


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"crf": 30}, "the codec's settings changed"),
        ({"model": "another"}, "the model changed"),
        ({"crf": 30, "segment_frames": 7}, "the codec's settings and the length of parts changed"),
    ],
)
def test_parts_of_another_request_are_not_used(tmp_path: Path, stopped: Path, changed: dict, sentence: str) -> None:
    told: list[VideoProgress] = []
    result = upscale(stopped, tmp_path / "b.mp4", told=told, resume=True, **{**SETTINGS, **changed})
    assert any(sentence in note for note in told[0].notes)
    assert result.frames_resumed == 0 and any(sentence in note for note in result.notes)


def test_parts_of_another_film_are_not_used(tmp_path: Path, stopped: Path) -> None:
    other = tmp_path / "a.mp4"
    other.write_bytes(stopped.read_bytes())
    result = upscale(other, tmp_path / "b.mp4", resume=True, **SETTINGS)
    assert result.frames_resumed == 0 and any("the video changed" in note for note in result.notes)


def break_it(folder: Path, how: str) -> int:
    """Damages the second of the parts; gives how many frames can still be used."""
    video, record = folder / "part-000001.mkv", folder / "part-000001.json"
    if how == "cut":
        video.write_bytes(video.read_bytes()[:-30])
    elif how == "zeros":
        video.write_bytes(bytes(video.stat().st_size))
    elif how == "no video":
        video.unlink()
    elif how == "no record":
        record.unlink()
    elif how == "bad record":
        record.write_text("{")
    elif how == "one bit":
        data = bytearray(video.read_bytes())
        data[len(data) // 2] ^= 1
        video.write_bytes(bytes(data))
    elif how == "another part":
        video.write_bytes((folder / "part-000000.mkv").read_bytes())
    elif how == "too few":
        text = json.loads(record.read_text())
        record.write_text(json.dumps({**text, "pts": text["pts"][:-1]}))
    elif how == "no job":
        (folder / "job.json").write_text("[]")
        return 0
    return SEGMENT


@pytest.mark.parametrize(
    "how", ["cut", "zeros", "no video", "no record", "bad record", "one bit", "another part", "too few", "no job"]
)
def test_damaged_parts_are_done_again(tmp_path: Path, stopped: Path, whole: dict[str, Path], how: str) -> None:
    usable = break_it(parts(tmp_path), how)
    (parts(tmp_path) / "part-000007.partial").write_text("left over")
    result = upscale(stopped, tmp_path / "b.mp4", resume=True, **SETTINGS)
    assert result.frames_resumed == usable
    assert how == "no record" or any("earlier run" in note for note in result.notes)
    assert same(tmp_path / "b.mp4", whole["h264"])


def open_full(path: Path, container: str, clock: int = 1000) -> OutputContainer:
    """A disk that is full: the kernel's own."""
    return av.open("/dev/full", "w", format=container)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("module", [writer, remux])
def test_a_full_disk_is_one_sentence_and_leaves_no_target(tmp_path: Path, source: Path, monkeypatch, module) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "open_output", open_full)
        with pytest.raises(RedlineError, match=r"^cannot write '.*': No space left on device\.$"):
            upscale(source, tmp_path / "b.mp4", **SETTINGS)
    # What is finished is kept; where that is nothing, so is nothing.
    kept = [".b.mp4.redline-parts"] if module is remux else []
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert len(notes_on_parts(tmp_path / "b.mp4")) == len(kept)
    enlarge, seen = counting()
    result = upscale(source, tmp_path / "b.mp4", enlarge=enlarge, resume=True, **SETTINGS)
    assert result.frames == FRAMES and sum(seen) == (FRAMES if module is writer else 0)


def test_a_folder_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RedlineError, match=r"^cannot write .*\.$"):
        upscale(source, tmp_path / "file" / "b.mp4", **SETTINGS)


def test_a_damaged_film_is_an_error_and_keep_going_finishes_it(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=40, time_base=Fraction(1, 1000))
    data = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(data[: int(len(data) * 0.7)])
    with pytest.raises(RedlineError, match="cut off.*--keep-going"):
        upscale(tmp_path / "a.mkv", tmp_path / "b.mkv", **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mkv"]
    result = upscale(tmp_path / "a.mkv", tmp_path / "b.mkv", keep_going=True, **SETTINGS)
    assert 20 < result.frames < 40 and any("cut off" in note for note in result.notes)
    assert len(shown(tmp_path / "b.mkv")) == result.frames


def test_damage_in_the_middle_keeps_the_parts_before_it(tmp_path: Path, source: Path) -> None:
    data = bytearray(source.read_bytes())
    source = tmp_path / "a.mp4"
    start = data.index(b"mdat")
    noise = np.random.default_rng(3).bytes(len(data) // 6)
    data[start + len(data) // 2 : start + len(data) // 2 + len(noise)] = noise
    source.write_bytes(bytes(data))
    with pytest.raises(RedlineError, match="--keep-going"):
        upscale(source, tmp_path / "b.mp4", **SETTINGS)
    kept = finished_parts(tmp_path) * SEGMENT
    assert kept
    result = upscale(source, tmp_path / "b.mp4", resume=True, keep_going=True, **SETTINGS)
    assert result.frames_resumed == kept and 20 < result.frames <= FRAMES
    assert any("frame" in note for note in result.notes)
