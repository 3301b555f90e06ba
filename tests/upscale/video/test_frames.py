"""Reading videos: every frame once, at its time, from the start or from any mark; damage is told."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch

from redline.errors import RedlineError
from redline.upscale.video import frames as reading
from redline.upscale.video import probe as probing
from redline.upscale.video.frames import Damage, Mark, digest, read_frames
from redline.upscale.video.pixels import to_rgb
from redline.upscale.video.probe import probe
from redline.video.truncated import missing_bytes
from upscale.video.clips import FAST, make_clip, open_frames, pattern


def test_open_frames_gives_pictures_with_their_times(tmp_path: Path) -> None:
    expected = make_clip(tmp_path / "a.mp4", frames=7, size=(50, 34), pixel_format="yuv444p")
    frames = list(open_frames(tmp_path / "a.mp4"))
    assert [time for _, time in frames] == expected
    for number, (pixels, _) in enumerate(frames):
        assert pixels.dtype == torch.float32 and pixels.shape == (3, 34, 50)
        original = torch.from_numpy(pattern(number, 50, 34)).permute(2, 0, 1) / 255
        assert float((pixels - original).abs().mean()) < 0.02


def test_a_film_is_described(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", pixel_aspect=Fraction(4, 3), rotation=90, colour=(6, 6, 6, 1))
    video = probe(tmp_path / "a.mkv")
    assert (video.width, video.height, video.frames, video.rate) == (48, 32, 20, 25)
    assert video.pixel_aspect == Fraction(4, 3) and video.colour.matrix == 6 and video.notes == ()
    assert video.matrix is not None and video.matrix[:2] == (0, -65536)
    assert probe(make(tmp_path / "plain.mkv")).matrix is None


def make(path: Path, **kwargs) -> Path:
    make_clip(path, **kwargs)
    return path


SOURCES = {
    "b-frames.mp4": {"options": {**FAST, "g": "12"}},
    "open-gop.mkv": {"options": {**FAST, "g": "9", "x264-params": "open-gop=1"}},
    "intra-refresh.mp4": {"options": {**FAST, "bf": "0", "x264-params": "intra-refresh=1:keyint=10"}},
    "broadcast.ts": {"options": {**FAST, "g": "8"}, "time_base": Fraction(1, 90000)},
    # Frames that all look alike, in a container that seeks too far: only the time stamp tells them apart.
    "still.ts": {"options": {**FAST, "g": "8"}, "time_base": Fraction(1, 90000), "draw": lambda *size: pattern(0)},
    "mpeg2.mpg": {"codec": "mpeg2video", "options": {"g": "6", "bf": "2"}, "time_base": Fraction(1, 25)},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "7", "cpu-used": "8"}},
    "old.avi": {"codec": "mpeg4", "options": {"g": "5", "bf": "2"}, "time_base": Fraction(1, 25)},
}


@pytest.mark.parametrize("name", SOURCES)
def test_reading_on_from_a_mark_gives_what_reading_through_gives(tmp_path: Path, name: str) -> None:
    video = probe(make(tmp_path / name, frames=24, **SOURCES[name]))
    damage = Damage(name, keep_going=False)
    frames = [(to_rgb(found.frame, video.colour), found.pts) for found in read_frames(video, damage)]
    assert len(frames) == 24
    for index in (0, 5, 11, 12, 22, 23):
        mark = Mark(index, frames[index][1], digest(frames[index][0]))
        rest = [(to_rgb(found.frame, video.colour), found.pts) for found in read_frames(video, damage, mark)]
        assert [pts for _, pts in rest] == [pts for _, pts in frames[index + 1 :]]
        assert all(torch.equal(ours, first) for (ours, _), (first, _) in zip(rest, frames[index + 1 :], strict=True))


def test_a_mark_that_is_not_found_by_seeking_is_found_by_counting(tmp_path: Path, monkeypatch) -> None:
    video = probe(make(tmp_path / "a.mp4", frames=12))
    frames = list(read_frames(video, Damage("a", False)))
    monkeypatch.setattr(reading, "_is_found", lambda video, frames, mark: False)
    mark = Mark(6, frames[6].pts, digest(to_rgb(frames[6].frame, video.colour)))
    assert [found.pts for found in read_frames(video, Damage("a", False), mark)] == [p.pts for p in frames[7:]]
    with pytest.raises(RedlineError, match="cannot find where"):
        next(read_frames(video, Damage("a", False), Mark(6, frames[6].pts, "another frame")))


def test_a_mark_that_looks_otherwise_is_not_taken(tmp_path: Path) -> None:
    video = probe(make(tmp_path / "a.mp4", frames=12))
    pts = [found.pts for found in read_frames(video, Damage("a", False))]
    with pytest.raises(RedlineError, match="cannot find where"):
        next(read_frames(video, Damage("a", False), Mark(6, pts[6], "another frame")))


def test_time_stamps_that_do_not_rise_are_moved_and_said(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.nut", frames=6, codec="ffv1", pixel_format="yuv420p")
    with av.open(str(tmp_path / "a.nut")) as source, av.open(str(tmp_path / "b.mkv"), "w") as target:
        made = target.add_stream_from_template(source.streams.video[0], opaque=True)
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size:
                packet.pts = packet.dts = max(0, number - 1) * 40
                packet.time_base, packet.stream = Fraction(1, 1000), made
                # The last frame is seen for long: that is no sign of a video that ends early.
                packet.duration = 5000
                target.mux(packet)
    damage = Damage("b", keep_going=False)
    assert [found.pts for found in read_frames(probe(tmp_path / "b.mkv"), damage)] == [0, 1, 40, 80, 120, 160]
    assert any("do not rise" in note for note in damage.notes.values())


def test_no_film(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("hello world\n" * 500)
    (tmp_path / "subtitles.mp4").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\n\n" * 50)
    make_clip(tmp_path / "video.mp4", frames=3, sound="aac")
    with av.open(str(tmp_path / "video.mp4")) as source, av.open(str(tmp_path / "sound.mp4"), "w") as target:
        made = target.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(audio=0):
            if packet.size:
                packet.stream = made
                target.mux(packet)
    cases = {
        "empty": "is empty",
        "text": "not a readable video",
        "subtitles": "unsupported format",
        "sound": "no video stream",
    }
    for name, sentence in cases.items():
        with pytest.raises(RedlineError, match=rf"{name}\.mp4.*{sentence}.*\.$"):
            probe(tmp_path / f"{name}.mp4")
    with pytest.raises(RedlineError, match="does not exist"):
        probe(tmp_path / "nothing.mp4")
    with pytest.raises(RedlineError, match="cannot read"):
        probe(tmp_path)


def cut(path: Path, share: float) -> Path:
    data = path.read_bytes()
    shorter = path.with_name(f"cut-{path.name}")
    shorter.write_bytes(data[: int(len(data) * share)])
    return shorter


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
def test_a_film_that_ends_early(tmp_path: Path, name: str) -> None:
    options = {"muxer": {"movflags": "faststart"}} if name == "a.mp4" else {}
    video = probe(cut(make(tmp_path / name, frames=40, **options), 0.6))
    with pytest.raises(
        RedlineError, match=r"truncated, [0-9,]+ bytes are missing at its end; give --keep-going[^.]*\.$"
    ):
        next(read_frames(video, Damage(name, keep_going=False)))
    damage = Damage(name, keep_going=True)
    assert 10 < len(list(read_frames(video, damage))) < 35
    assert any("truncated" in note for note in damage.notes.values())


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.mov", "a.webm"])
def test_how_much_is_missing(tmp_path: Path, name: str) -> None:
    codec = {"codec": "libvpx-vp9", "options": {"cpu-used": "8"}, "sound": "libopus"} if name == "a.webm" else {}
    path = make(tmp_path / name, frames=4, **{"sound": "aac", **codec})
    data = path.read_bytes()
    assert missing_bytes(path) == 0
    for lost in (1, 7, 100):
        path.write_bytes(data[:-lost])
        assert missing_bytes(path) == lost
    path.write_bytes(data + b"SEFT and other things that cameras append")
    assert missing_bytes(path) == 0


def test_a_reader_that_loses_its_way(tmp_path: Path) -> None:
    path = make(tmp_path / "a.mkv", frames=60)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(400) + data[middle + 400 :])
    with pytest.raises(RedlineError, match="--keep-going"):
        list(read_frames(probe(path), Damage("a", keep_going=False)))


def test_an_index_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="it is truncated and its index is missing"):
        probe(cut(make(tmp_path / "a.mp4"), 0.9))


def test_damage_in_the_middle(tmp_path: Path) -> None:
    path = make(tmp_path / "a.mp4", frames=40)
    data = bytearray(path.read_bytes())
    generator = torch.Generator().manual_seed(5)
    noise = bytes(torch.randint(0, 256, (len(data) // 8,), generator=generator, dtype=torch.uint8).tolist())
    data[len(data) // 2 : len(data) // 2 + len(noise)] = noise
    path.write_bytes(bytes(data))
    video = probe(path)
    with pytest.raises(RedlineError, match=r"a frame .* at 0:0[0-9.]+; give --keep-going"):
        list(read_frames(video, Damage("a", keep_going=False)))
    damage = Damage("a", keep_going=True)
    assert 20 < len(list(read_frames(video, damage))) <= 40 and damage.notes


def test_pictures_that_change_their_size(tmp_path: Path) -> None:
    for name, size in (("small", (48, 32)), ("large", (64, 48))):
        make_clip(tmp_path / f"{name}.ts", size=size, frames=5, time_base=Fraction(1, 90000))
    both = tmp_path / "both.ts"
    both.write_bytes((tmp_path / "small.ts").read_bytes() + (tmp_path / "large.ts").read_bytes())
    with pytest.raises(RedlineError, match="change from 48×32 to 64×48"):
        list(open_frames(both))


def test_films_that_were_joined_without_care(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.ts", frames=25, time_base=Fraction(1, 90000))
    twice = tmp_path / "twice.ts"
    twice.write_bytes((tmp_path / "a.ts").read_bytes() * 2)
    with pytest.raises(RedlineError, match=r"time jumps back by [01]\.\d s at 0:01"):
        list(open_frames(twice))


def test_a_recording_that_starts_between_key_frames(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=20, options={**FAST, "bf": "0", "g": "10", "sc_threshold": "0"})
    with av.open(str(tmp_path / "a.mkv")) as source, av.open(str(tmp_path / "b.mkv"), "w") as target:
        made = target.add_stream_from_template(source.streams.video[0], opaque=True)
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size and number > 3:
                packet.stream = made
                target.mux(packet)
    damage = Damage("b", keep_going=False)
    found = list(read_frames(probe(tmp_path / "b.mkv"), damage))
    assert len(found) >= 10 and not found[0].frame.is_corrupt


@pytest.mark.parametrize(
    ("pts", "dts", "duration", "end"),
    [(6, 4, 2, Fraction(8, 10)), (None, 4, 2, Fraction(6, 10)), (6, 4, None, Fraction(6, 10)), (None, None, 2, 0)],
)
def test_the_end_of_a_packet(pts: int | None, dts: int | None, duration: int | None, end: Fraction) -> None:
    packet: Any = SimpleNamespace(pts=pts, dts=dts, duration=duration, time_base=Fraction(1, 10))
    assert reading._end(packet) == end


@pytest.mark.parametrize(
    ("frames", "duration", "of_container", "count"),
    [(7, 20, 9_000_000, 7), (0, 20, 9_000_000, 40), (0, None, 2_000_000, 20), (0, None, None, None), (0, 1, None, 2)],
)
def test_the_number_of_frames_is_stored_or_follows_from_the_duration(
    frames: int, duration: int | None, of_container: int | None, count: int | None
) -> None:
    stream: Any = SimpleNamespace(frames=frames, duration=duration, time_base=Fraction(1, 5))
    container: Any = SimpleNamespace(duration=of_container)
    assert probing._count(container, stream, Fraction(10)) == count


def test_damage_of_one_kind_is_counted_in_one_note() -> None:
    damage = Damage("a.mkv", True)
    for place in ("at 1 s", "at 2 s", "at 3 s"):
        damage.met("a frame is damaged", place)
    damage.met("a frame cannot be decoded", "at 4 s")
    damage.remark("the rest cannot be found")
    assert list(damage.notes.values()) == [
        "a frame is damaged at 1 s (and 2 more)", "a frame cannot be decoded at 4 s", "the rest cannot be found",
    ]  # fmt: skip
    with pytest.raises(RedlineError, match=r"^'a\.mkv': a frame is damaged at 1 s; give --keep-going"):
        Damage("a.mkv", False).met("a frame is damaged", "at 1 s")
