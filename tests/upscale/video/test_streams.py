"""What else a video holds: sound, subtitles, chapters, tags, covers and attachments, copied or told."""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
from av.stream import Disposition

from redline.upscale.video.settings import VideoResult
from upscale.video.clips import CHAPTERS, make_clip, pattern, times, upscale


def packets(path: Path, kind: str, number: int = 0) -> list[tuple[Fraction, Fraction, bytes]]:
    """When each packet of a stream is played, for how long, and its bytes."""
    with av.open(str(path)) as container:
        stream = getattr(container.streams, kind)[number]
        found = [packet for packet in container.demux(stream) if packet.size]
        base = Fraction(stream.time_base)
        return [(packet.pts * base, (packet.duration or 0) * base, bytes(packet)) for packet in found]


def texts(path: Path) -> list[tuple[Fraction, str]]:
    """When each line is shown, and its words without their styles."""
    with av.open(str(path)) as container:
        stream = container.streams.subtitles[0]
        lines = [(packet.pts, stream.decode(packet)) for packet in container.demux(stream) if packet.size]
        return [(pts * stream.time_base, re.sub("{.*?}", "", line[0].dialogue.decode())) for pts, line in lines if line]


def tags(path: Path, kind: str) -> dict[str, str]:
    with av.open(str(path)) as container:
        return dict(getattr(container.streams, kind)[0].metadata)


def chapters(path: Path) -> list[tuple[Fraction, Fraction, str]]:
    with av.open(str(path)) as container:
        return [
            (found["start"] * found["time_base"], found["end"] * found["time_base"], found["metadata"]["title"])
            for found in container.chapters()
        ]


def rich(path: Path, **more: Any) -> Path:
    make_clip(path, frames=25, sound="aac", chapters=True, time_base=Fraction(1, 1000), **more)
    return path


@pytest.mark.parametrize(
    ("source", "target"), [("a.mkv", "b.mkv"), ("a.mp4", "b.mp4"), ("a.mp4", "b.mov"), ("a.mkv", "b.mp4")]
)
def test_sound_is_copied_packet_by_packet(tmp_path: Path, source: str, target: str) -> None:
    result = upscale(rich(tmp_path / source), tmp_path / target, segment_frames=9)
    before, after = (packets(tmp_path / name, "audio") for name in (source, target))
    assert [data for _, _, data in after] == [data for _, _, data in before] and len(before) > 40
    # Whole milliseconds in Matroska, whole samples in MP4.
    tolerance = 0 if Path(source).suffix == Path(target).suffix else Fraction(1, 1999)
    assert all(abs(ours - true) <= tolerance for (ours, _, _), (true, _, _) in zip(after, before, strict=True))
    assert tags(result.target, "audio")["language"] == "eng" and result.notes == ()
    assert "Commentary" in tags(result.target, "audio").values()


@pytest.mark.parametrize("target", ["b.mkv", "b.mp4", "b.mov", "b.webm"])
def test_chapters_titles_and_languages(tmp_path: Path, target: str) -> None:
    codec = {"codec": "vp9"} if target == "b.webm" else {}
    result = upscale(rich(tmp_path / "a.mkv"), tmp_path / target, **codec)
    wanted = [(chapter["start"], chapter["end"], chapter["metadata"]["title"]) for chapter in CHAPTERS]
    assert chapters(result.target) == [
        (Fraction(start, 1000), Fraction(end, 1000), title) for start, end, title in wanted
    ]
    with av.open(str(result.target)) as container:
        assert container.metadata["title"] == "A video"
    assert tags(result.target, "video")["language"] == "fra"


def test_tags_that_a_container_does_not_know_are_told(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=3)
    with av.open(str(tmp_path / "a.mkv")) as source, av.open(str(tmp_path / "b.mkv"), "w") as target:
        target.metadata.update({"title": "Kept", "WEATHER": "rain"})
        made = target.add_stream_from_template(source.streams.video[0], opaque=True)
        made.metadata["language"] = "deu"
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = made
                target.mux(packet)
    assert upscale(tmp_path / "b.mkv", tmp_path / "c.mkv").notes == ()
    notes = upscale(tmp_path / "b.mkv", tmp_path / "c.mov").notes
    assert notes == (".mov does not keep these tags: WEATHER, language deu",)


@pytest.mark.parametrize(
    ("codec", "source", "target"),
    [("srt", "a.mkv", "b.mkv"), ("ass", "a.mkv", "b.mkv"), ("mov_text", "a.mp4", "b.mp4"), ("srt", "a.mkv", "b.mp4"),
     ("ass", "a.mkv", "b.mov"), ("mov_text", "a.mp4", "b.mkv"), ("srt", "a.mkv", "b.webm")],
)  # fmt: skip
def test_subtitles_are_copied_or_converted(tmp_path: Path, codec: str, source: str, target: str) -> None:
    settings = {"codec": "vp9"} if target == "b.webm" else {}
    result = upscale(rich(tmp_path / source, subtitles=codec), tmp_path / target, **settings)
    assert texts(result.target) == [(Fraction(1, 10), "Ciao"), (Fraction(1, 2), "mondo")]
    assert tags(result.target, "subtitles")["language"] == "ita"
    is_copied = Path(source).suffix == Path(target).suffix
    assert any("is converted to" in note for note in result.notes) == (not is_copied)
    if is_copied:
        assert packets(result.target, "subtitles") == packets(tmp_path / source, "subtitles")


@pytest.mark.parametrize(("codec", "target"), [("libopus", "b.mov"), ("aac", "b.webm"), ("pcm_s16le", "b.webm")])
def test_sound_that_does_not_fit_is_converted(tmp_path: Path, codec: str, target: str) -> None:
    make_clip(tmp_path / "a.mkv", frames=25, sound=codec)
    settings = {"codec": "vp9"} if target == "b.webm" else {}
    result = upscale(tmp_path / "a.mkv", tmp_path / target, **settings)
    assert any(f"audio stream 1 ({codec.removeprefix('lib')}, eng) is converted" in note for note in result.notes)
    with av.open(str(result.target)) as container:
        samples = [(frame.time, frame.samples) for frame in container.decode(audio=0)]
        assert container.streams.audio[0].layout.name == "stereo"
    assert abs(samples[0][0]) < 0.03 and abs(sum(count for _, count in samples) / 48000 - 1) < 0.06


def test_attachments(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=3, attachment=True)
    assert upscale(tmp_path / "a.mkv", tmp_path / "b.mkv").notes == ()
    with av.open(str(tmp_path / "b.mkv")) as container:
        kept = container.streams.attachments[0]
        assert (kept.name, kept.mimetype, kept.data) == ("font.ttf", "font/ttf", b"not really a font")
    notes = upscale(tmp_path / "a.mkv", tmp_path / "b.mp4").notes
    assert notes == ("attachment stream 1 (font.ttf) is left out: only .mkv holds attachments",)


@pytest.mark.parametrize("target", ["b.mkv", "b.mp4"])
def test_stripped_of_tags(tmp_path: Path, target: str) -> None:
    make_clip(tmp_path / "a.mkv", frames=5, sound="aac", chapters=True, attachment=True, rotation=90)
    result = upscale(tmp_path / "a.mkv", tmp_path / target, strip=True)
    assert not any("tags" in note for note in result.notes)
    with av.open(str(result.target)) as container:
        tags = [container.metadata, *(stream.metadata for stream in container.streams if stream.type != "attachment")]
        said = " ".join(text for each in tags for text in each.values())
        assert "A video" not in said and "Commentary" not in said
        # What players choose and show by stays.
        assert [stream.metadata["language"] for stream in list(container.streams)[:2]] == ["fra", "eng"]
        assert [chapter["metadata"]["title"] for chapter in container.chapters()] == ["one", "two"]
        assert next(container.decode(video=0)).rotation
        if target == "b.mkv":
            assert container.streams.attachments[0].name == "font.ttf"


def jpeg() -> bytes:
    context: Any = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt, context.time_base = 16, 16, "yuvj420p", Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(pattern(0, 16, 16), format="rgb24").reformat(format="yuvj420p")
    frame.pts = 0
    return bytes((context.encode(frame) + context.encode(None))[0])


def covered(path: Path) -> Path:
    """A video with a cover image: a stream in MP4, an attached file in Matroska."""
    plain = path.with_name(f"plain{path.suffix}")
    make_clip(plain, frames=5, sound="aac")
    with av.open(str(plain)) as source, av.open(str(path), "w") as target:
        made: dict[int, Any] = {
            stream.index: target.add_stream_from_template(stream, opaque=True) for stream in source.streams
        }
        if path.suffix == ".mkv":
            target.add_attachment("cover.jpg", "image/jpeg", jpeg())
        else:
            cover: Any = target.add_stream("mjpeg")
            cover.width, cover.height, cover.pix_fmt, cover.disposition = 16, 16, "yuvj420p", Disposition.attached_pic
            packet = av.Packet(jpeg())
            packet.pts = packet.dts = 0
            packet.time_base, packet.stream = Fraction(1, 25), cover
            target.mux(packet)
        for packet in source.demux():
            if packet.size:
                packet.stream = made[packet.stream.index]
                target.mux(packet)
    return path


def cover_of(result: VideoResult) -> bytes | None:
    with av.open(str(result.target)) as container:
        covers = [stream for stream in container.streams.video if stream.disposition & Disposition.attached_pic]
        return bytes(next(container.demux(covers[0]))) if covers else None


@pytest.mark.parametrize("source", ["a.mp4", "a.mkv"])
def test_the_cover_picture(tmp_path: Path, source: str) -> None:
    covered(tmp_path / source)
    for target in ("b.mp4", "b.mkv"):
        result = upscale(tmp_path / source, tmp_path / target)
        assert cover_of(result) == jpeg() and result.notes == () and result.frames == 5
        assert len(packets(result.target, "audio")) == len(packets(tmp_path / source, "audio"))
    result = upscale(tmp_path / source, tmp_path / "b.mov")
    assert cover_of(result) is None and result.notes == ("the cover image is left out: mov cannot hold it",)


def test_a_second_video_stream_is_copied_and_told(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=6)
    make_clip(tmp_path / "b.mkv", frames=6, size=(32, 32))
    with (
        av.open(str(tmp_path / "a.mkv")) as large,
        av.open(str(tmp_path / "b.mkv")) as small,
        av.open(str(tmp_path / "c.mkv"), "w") as target,
    ):
        for source in (large, small):
            source.streams.video[0].metadata.clear()
        made = [target.add_stream_from_template(source.streams.video[0], opaque=True) for source in (large, small)]
        for pair in zip(large.demux(video=0), small.demux(video=0), strict=True):
            for packet, stream in zip(pair, made, strict=True):
                if packet.size:
                    packet.stream = stream
                    target.mux(packet)
    result = upscale(tmp_path / "c.mkv", tmp_path / "d.mkv")
    assert result.notes == ("video stream 1 (h264) is copied without upscaling",)
    assert packets(result.target, "video", 1) == packets(tmp_path / "c.mkv", "video", 1)


def test_broadcast_times_are_moved_to_the_start_together(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.ts", frames=25, sound="aac", time_base=Fraction(1, 90000))
    with av.open(str(tmp_path / "a.ts")) as container:
        start = Fraction(container.start_time, av.time_base)
    assert start > 0
    result = upscale(tmp_path / "a.ts", tmp_path / "b.mp4")
    assert any(f"all timestamps are shifted by {float(start):.3f} s" in note for note in result.notes)
    frames = zip(times(tmp_path / "a.ts"), times(result.target), strict=True)
    sounds = zip(packets(tmp_path / "a.ts", "audio"), packets(result.target, "audio"), strict=True)
    moved = [true - ours for true, ours in frames] + [true[0] - ours[0] for true, ours in sounds]
    assert all(abs(shift - start) <= Fraction(1, 40000) for shift in moved) and len(moved) > 60


def test_sound_whose_times_step_back_is_moved_and_told(tmp_path: Path) -> None:
    """Two recordings joined without care: the frames are told by the reader, the sound by the writer."""
    make_clip(tmp_path / "a.ts", frames=25, sound="aac", time_base=Fraction(1, 90000))
    (tmp_path / "b.ts").write_bytes((tmp_path / "a.ts").read_bytes() * 2)
    result = upscale(tmp_path / "b.ts", tmp_path / "c.mp4", keep_going=True)
    assert any("audio or subtitle packets" in note for note in result.notes)
    assert any("jumps back" in note for note in result.notes)
    starts = [start for start, _, _ in packets(result.target, "audio")]
    assert starts == sorted(starts) and len(starts) == len(packets(tmp_path / "b.ts", "audio"))
