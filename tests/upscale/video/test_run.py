"""Whole videos: times, colours, rotation, depth and shape come out as they went in, twice as large."""

import random
import threading
import time
from fractions import Fraction
from itertools import product
from pathlib import Path

import av
import pytest
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.pinned_copies import PendingCopy, PlainCopies
from redline.upscale.video import encoders as choosing
from redline.upscale.video import parts as writing
from redline.upscale.video import run as running
from redline.upscale.video.probe import probe
from redline.upscale.video.run import upscale_video
from redline.upscale.video.settings import VideoProgress, VideoSettings
from upscale.video.clips import (
    doubled,
    finishing,
    make_clip,
    open_frames,
    pattern,
    repeated,
    rgb,
    shown,
    times,
    upscale,
)

# 25 frames a second with a pause, a burst and a single step of one tick.
UNEVEN = [0, 512, 1024, 1025, 3000, 3512, 9000, 9100, 9200, 9300, 20000, 20512]


def draw_chart(number: int, width: int, height: int):
    """Colours of the cube's corners and between, in blocks that do not move."""
    colours = torch.tensor([*product((16, 235), repeat=3), *product((60, 180), repeat=3)], dtype=torch.uint8)
    blocks = colours.reshape(2, 8, 3).repeat_interleave(height // 2, 0).repeat_interleave(width // 8, 1)
    return blocks.numpy()


def block_means(frames: Tensor) -> Tensor:
    """The middle of each of the 2×8 blocks, (N, 2, 8, 3)."""
    blocks = frames.unflatten(1, (2, -1)).unflatten(3, (8, -1))
    height, width = blocks.shape[2], blocks.shape[4]
    return blocks[:, :, height // 4 : 3 * height // 4, :, width // 4 : 3 * width // 4].mean((2, 4))


@pytest.mark.parametrize(("matrix", "color_range"), [*product((1, 6, 9), (1, 2))])
@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p"])
def test_colours_are_kept(tmp_path: Path, matrix: int, color_range: int, pixel_format: str) -> None:
    """As a player's converter shows both videos, by the tags that each carries."""
    source, target = tmp_path / "a.mp4", tmp_path / "b.mp4"
    make_clip(
        source,
        frames=3,
        size=(128, 32),
        pixel_format=pixel_format,
        colour=(matrix, 1, 1, color_range),
        options={"crf": "4", "preset": "ultrafast"},
        draw=draw_chart,
    )
    upscale(source, target, crf=2)
    before, after = probe(source), probe(target)
    assert after.colour == before.colour and after.pixel_format in (pixel_format, pixel_format.replace("yuv", "yuvj"))
    difference = (block_means(rgb(target)) - block_means(rgb(source))).abs().max()
    assert float(difference) * 255 < 2


def test_colours_without_a_name_get_one(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=2, colour=(2, 2, 2, 1))
    result = upscale(tmp_path / "a.mp4", tmp_path / "b.mp4")
    assert any("names no colour matrix: BT.601" in note for note in result.notes)
    assert probe(tmp_path / "b.mp4").colour.matrix == 6


@pytest.mark.parametrize("suffix", [".mp4", ".mov"])
def test_uneven_times_stay_exact(tmp_path: Path, suffix: str) -> None:
    expected = make_clip(tmp_path / "a.mp4", pts=UNEVEN)
    result = upscale(tmp_path / "a.mp4", tmp_path / f"b{suffix}", segment_frames=5)
    assert times(tmp_path / f"b{suffix}") == expected == [Fraction(pts, 12800) for pts in UNEVEN]
    assert result.notes == () and result.frames == len(UNEVEN)


@pytest.mark.parametrize("start", [1, 777, 5_000_000])
def test_a_film_that_does_not_start_at_0(tmp_path: Path, start: int) -> None:
    expected = make_clip(tmp_path / "a.mp4", pts=[start + pts for pts in UNEVEN], sound="aac" if start < 9999 else None)
    for name in ("b.mp4", "b.mov"):
        upscale(tmp_path / "a.mp4", tmp_path / name)
        # PyAV, which made the source, rounds its start to milliseconds.
        assert times(tmp_path / name) == times(tmp_path / "a.mp4")
    assert abs(times(tmp_path / "a.mp4")[0] - expected[0]) < Fraction(1, 1000)


def test_matroska_keeps_milliseconds_and_says_what_it_rounds(tmp_path: Path) -> None:
    source = tmp_path / "a.mkv"
    expected = make_clip(source, time_base=Fraction(1, 1000), pts=[0, 40, 81, 500, 501, 900, 1300])
    for suffix in (".mkv", ".mp4"):
        assert upscale(source, tmp_path / f"b{suffix}").notes == ()
        assert times(tmp_path / f"b{suffix}") == expected
    expected = make_clip(tmp_path / "c.mp4", pts=UNEVEN)
    result = upscale(tmp_path / "c.mp4", tmp_path / "d.mkv")
    assert any("rounded to milliseconds" in note for note in result.notes)
    assert all(abs(ours - true) <= Fraction(1, 2000) for ours, true in zip(times(result.target), expected, strict=True))


@pytest.mark.parametrize(
    ("suffix", "rotation"),
    [(".mp4", 90), (".mp4", 180), (".mp4", -90), (".mkv", 90), (".mkv", -90), (".mov", 90), (".webm", 90)],
)
def test_rotation_both_ways_a_player_may_see_it(tmp_path: Path, suffix: str, rotation: int) -> None:
    make_clip(tmp_path / "a.mp4", frames=2, rotation=rotation, pixel_aspect=Fraction(4, 3))
    codec = {"codec": "vp9"} if suffix == ".webm" else {}
    upscale(tmp_path / "a.mp4", tmp_path / f"b{suffix}", **codec)
    before, after = (probe(tmp_path / name) for name in ("a.mp4", f"b{suffix}"))
    # A player that turns by the tag turns as before, and one that does not shows the stored frame as before.
    assert before.matrix is not None and after.matrix is not None
    assert [after.matrix[index] for index in (0, 1, 3, 4)] == [before.matrix[index] for index in (0, 1, 3, 4)]
    with av.open(str(tmp_path / f"b{suffix}")) as container:
        assert next(container.decode(video=0)).rotation in (rotation, rotation % 360, rotation - 360)
    stored, original = rgb(tmp_path / f"b{suffix}")[0], torch.from_numpy(pattern(0)).float() / 255
    assert stored.shape == (64, 96, 3)
    assert float((stored[::2, ::2] - original).abs().mean()) < 0.05


def test_a_matrix_that_also_moves_is_scaled(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=2)
    with av.open(str(tmp_path / "a.mp4")) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        made = target.add_stream_from_template(source.streams.video[0], opaque=True)
        made.set_display_matrix([0, 65536, 0, -65536, 0, 0, 32 << 16, 0, 1 << 30])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = made
                target.mux(packet)
    upscale(tmp_path / "b.mp4", tmp_path / "c.mp4")
    before, after = probe(tmp_path / "b.mp4").matrix, probe(tmp_path / "c.mp4").matrix
    assert before is not None and before[6] == 32 << 16
    assert after == tuple(value * 2 if index == 6 else value for index, value in enumerate(before))


@pytest.mark.parametrize(
    ("codec", "suffix", "pixel_format", "exact"),
    [
        ("h264", ".mp4", "yuv420p10le", False),
        ("hevc", ".mov", "yuv420p10le", False),
        ("hevc", ".mkv", "yuv422p", False),
        ("av1", ".mp4", "yuv420p10le", False),
        ("vp9", ".webm", "yuv420p", False),
        ("ffv1", ".mkv", "yuv420p", True),
        ("ffv1", ".mkv", "yuv420p10le", True),
        ("prores", ".mov", "yuv422p10le", False),
        ("mpeg4", ".mp4", "yuv420p", False),
    ],
)
def test_every_codec(tmp_path: Path, codec: str, suffix: str, pixel_format: str, exact: bool) -> None:
    source, target = tmp_path / "a.mkv", tmp_path / f"b{suffix}"
    expected = make_clip(
        source, frames=7, size=(64, 64), pixel_format=pixel_format, time_base=Fraction(1, 1000), colour=(6, 6, 6, 1)
    )
    result = upscale(source, target, codec=codec, segment_frames=4)
    before, after = probe(source), probe(target)
    assert times(target) == expected and (after.width, after.height) == (128, 128)
    tags = ("primaries", "transfer") if codec == "ffv1" else ("matrix", "primaries", "transfer", "full_range")
    assert all(getattr(after.colour, tag) == getattr(before.colour, tag) for tag in tags)
    bits = max(c.bits for c in av.VideoFormat(pixel_format).components)
    assert av.VideoFormat(after.pixel_format).components[0].bits == bits and not any("bits" in n for n in result.notes)
    if exact:
        top = 2**bits - 1
        for (small, _), (large, _) in zip(open_frames(source), open_frames(target), strict=True):
            assert torch.equal((large * top).round(), (doubled(small[None])[0] * top).round())
    with av.open(str(target)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 25 and (
            codec != "hevc" or suffix == ".mkv" or stream.codec_context.codec_tag == "hvc1"
        )


def test_pixels_that_are_not_square(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=2, size=(64, 64), pixel_aspect=Fraction(64, 45))
    for name, codec in (("b.mp4", "h264"), ("b.mkv", "h264"), ("c.mp4", "av1")):
        upscale(tmp_path / "a.mp4", tmp_path / name, codec=codec)
        assert probe(tmp_path / name).pixel_aspect == Fraction(64, 45)
    result = upscale(tmp_path / "a.mp4", tmp_path / "d.webm", codec="av1")
    assert any("pixel aspect ratio 64/45 is lost" in note for note in result.notes)


@pytest.mark.parametrize(
    ("pixel_format", "size", "wanted"), [("yuv420p", (27, 15), (82, 46)), ("yuv444p", (27, 15), (81, 45))]
)
def test_odd_sizes(tmp_path: Path, pixel_format: str, size: tuple[int, int], wanted: tuple[int, int]) -> None:
    make_clip(tmp_path / "a.mkv", frames=3, size=size, codec="ffv1", pixel_format=pixel_format, options={"level": "3"})
    result = upscale(tmp_path / "a.mkv", tmp_path / "b.mp4", enlarge=repeated(3), scale=3, crf=4)
    video = probe(result.target)
    assert (result.width, result.height) == (video.width, video.height) == wanted
    assert any("odd" in note for note in result.notes) == (pixel_format == "yuv420p")
    frame, original = rgb(result.target)[0], rgb(tmp_path / "a.mkv")[0]
    assert float((frame[1::3, 1::3][:15, :27] - original).abs().mean()) < 0.03
    assert float((frame[:, -1] - frame[:, -2]).abs().mean()) < 0.02


def test_frames_come_one_by_one_and_in_order(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=23)
    frames = []

    def enlarge(batch: Tensor) -> Tensor:
        assert batch.dtype == torch.float32 and float(batch.min()) >= 0 and float(batch.max()) <= 1
        assert len(batch) == 1
        frames.extend(batch)
        return doubled(batch).to(torch.bfloat16)

    result = upscale(tmp_path / "a.mp4", tmp_path / "b.mp4", enlarge=enlarge, segment_frames=10)
    assert len(frames) == result.frames == 23
    for ours, small in zip(rgb(tmp_path / "b.mp4"), frames, strict=True):
        assert float((ours[::2, ::2].permute(2, 0, 1) - small).abs().mean()) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_delays_in_any_stage_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    make_clip(tmp_path / "a.mp4", frames=12)
    chance = random.Random(seed)

    def delayed(function):
        def slow(*args):
            time.sleep(chance.random() * 0.02 * chance.choice([0, 1]))
            return function(*args)

        return slow

    upscale(tmp_path / "a.mp4", tmp_path / "b.mp4", segment_frames=5)
    monkeypatch.setattr(running, "to_rgb", delayed(running.to_rgb))
    monkeypatch.setattr(writing, "to_frame", delayed(writing.to_frame))
    monkeypatch.setattr(running, "_WAITING_FRAMES", 1 + seed)
    upscale(tmp_path / "a.mp4", tmp_path / "c.mp4", enlarge=delayed(doubled), segment_frames=5)
    pairs = zip(shown(tmp_path / "b.mp4"), shown(tmp_path / "c.mp4"), strict=True)
    assert all(one[0] == two[0] and (one[1] == two[1]).all() for one, two in pairs)


@pytest.mark.parametrize("stage", ["decoding", "enlarging", "encoding"])
def test_a_failure_in_any_stage_surfaces_and_leaves_no_target(tmp_path: Path, monkeypatch, stage: str) -> None:
    make_clip(tmp_path / "a.mp4", frames=30)
    threads = threading.active_count()

    def failing(function):
        calls = iter(range(99))

        def fail(*args):
            if next(calls) == 11:
                raise MemoryError(stage)
            return function(*args)

        return fail

    if stage == "decoding":
        monkeypatch.setattr(running, "to_rgb", failing(running.to_rgb))
    if stage == "encoding":
        monkeypatch.setattr(writing, "to_frame", failing(writing.to_frame))
    with pytest.raises(MemoryError, match=stage):
        upscale(tmp_path / "a.mp4", tmp_path / "b.mp4", enlarge=failing(doubled) if stage == "enlarging" else doubled)
    assert threading.active_count() == threads and not (tmp_path / "b.mp4").exists()


def test_progress_tells_how_far_and_how_long(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=20)
    told: list[VideoProgress] = []
    upscale_video(tmp_path / "a.mkv", tmp_path / "b.mkv", finishing(doubled), 2, VideoSettings(), told.append)
    done = [progress.frames_done for progress in told]
    assert done == sorted(done) and done[-1] == 20 and {progress.frames_total for progress in told} == {20}
    halfway = [progress for progress in told if 0 < progress.frames_done < 20]
    assert all(progress.frames_per_s and progress.left_s for progress in halfway)
    assert done[0] == 0 and told[0].left_s is None
    assert told[-1].left_s == 0


def test_a_bad_request_is_one_sentence(tmp_path: Path) -> None:
    source = tmp_path / "a.mp4"
    make_clip(source, frames=2)
    cases: list[tuple[str, dict, str]] = [
        ("b.mp4", {"codec": "divx"}, "unknown codec 'divx': choose h264, hevc"),
        ("b.avi", {}, "unknown video format '.avi'; use one of .mp4"),
        ("b.mp4", {"codec": "prores"}, ".mp4 cannot hold prores: choose .mov or .mkv"),
        ("b.mkv", {"codec": "ffv1", "crf": 3}, "ffv1 has no crf"),
        ("a.mp4", {}, "the output 'a.mp4' is the source video"),
    ]
    for name, settings, sentence in cases:
        with pytest.raises(RedlineError, match=sentence.replace(".", r"\.")):
            upscale(source, tmp_path / name, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4"]


def test_without_x264_another_codec_is_taken_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_clip(tmp_path / "a.mp4", frames=3)
    exists = choosing._exists
    monkeypatch.setattr(choosing, "_exists", lambda name: name != "libx264" and exists(name))
    result = upscale(tmp_path / "a.mp4", tmp_path / "b.mp4", codec="auto")
    assert result.encoder == "mpeg4" and any("no encoder for h264" in note for note in result.notes)
    with pytest.raises(RedlineError, match="unknown codec 'h264'"):
        upscale(tmp_path / "a.mp4", tmp_path / "c.mp4", codec="h264")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda batch: batch, r"gave \(1, 3, 32, 48\) torch.float32 instead of \(1, 3, 64, 96\)"),
        (lambda batch: (doubled(batch) * 255).to(torch.uint8), "torch.uint8 instead"),
    ],
)
def test_a_model_that_gives_something_else(tmp_path: Path, answer, sentence: str) -> None:
    make_clip(tmp_path / "a.mp4", frames=3)
    with pytest.raises(RedlineError, match=sentence):
        upscale(tmp_path / "a.mp4", tmp_path / "b.mp4", enlarge=answer)
    assert not (tmp_path / "b.mp4").exists()


def test_interlaced_and_transparent_films_are_told(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=4, options={"x264-params": "interlaced=1", "preset": "ultrafast"})
    make_clip(tmp_path / "b.mkv", frames=2, codec="ffv1", pixel_format="yuva420p", options={"level": "3"})
    assert any("interlaced" in note for note in probe(tmp_path / "a.mkv").notes)
    assert any("transparency" in note for note in probe(tmp_path / "b.mkv").notes)


@pytest.mark.parametrize(("codec", "pixel_format"), [("h264", "yuv420p10le"), ("ffv1", "gbrp10le"), ("ffv1", "bgr0")])
def test_a_picture_leaves_as_one_copy(tmp_path: Path, codec: str, pixel_format: str) -> None:
    left: list[Tensor] = []

    class Counting(PlainCopies):
        def to_host(self, tensor: Tensor, into: Tensor | None = None, ring: int | None = None) -> PendingCopy:
            left.append(tensor)
            return super().to_host(tensor, into, ring)

    make_clip(
        tmp_path / "a.mkv",
        frames=3,
        codec=codec,
        pixel_format=pixel_format,
        options={"level": "3"} if codec == "ffv1" else {},
    )
    settings = VideoSettings(codec=codec)
    target, tell = tmp_path / "b.mkv", lambda _: None
    upscale_video(tmp_path / "a.mkv", target, finishing(doubled), 2, settings, tell, Counting())
    assert len(left) == 3 and len(shown(target)) == 3
