"""Video files give every frame once, upright and at its exact time; other files are refused."""

import re
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from redline.errors import RedlineError
from redline.stream.endpoints import EndpointOptions, open_source
from redline.stream.sources.live_input import Address, LiveInput
from redline.stream.sources.video_file import DamagedVideo, VideoFile, _turned
from stream.clocks import ManualClock
from upscale.video.clips import make_clip, pattern


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov"])
def test_every_frame_comes_once_at_its_time(tmp_path: Path, name: str) -> None:
    expected = make_clip(tmp_path / name, frames=7, size=(51, 35), pixel_format="yuv444p")
    source = VideoFile(tmp_path / name, ManualClock())
    frames = list(source.frames())
    assert [frame.time_s for frame in frames] == expected
    assert [frame.index for frame in frames] == list(range(7))
    assert (source.height, source.width, source.rate, source.is_live) == (35, 51, 25, False)
    for frame in frames:
        assert frame.pixels.shape == (35, 51, 3) and frame.captured_s == 100.0
        original = pattern(frame.index, 51, 35).astype(int)
        assert np.abs(frame.pixels.numpy() - original).mean() < 5
    assert len(list(source.frames())) == 7, "the frames can be asked for again"


def test_variable_frame_rate_is_kept_to_the_tick(tmp_path: Path) -> None:
    ticks = [0, 512, 513, 4000, 4100, 9999]
    make_clip(tmp_path / "v.mp4", pts=ticks, frames=6)
    frames = list(VideoFile(tmp_path / "v.mp4").frames())
    assert [frame.time_s for frame in frames] == [Fraction(tick, 12800) for tick in ticks]


def test_a_video_that_lies_on_its_side_is_put_upright(tmp_path: Path) -> None:
    make_clip(tmp_path / "r.mp4", frames=2, rotation=90, size=(48, 32), pixel_format="yuv444p")
    source = VideoFile(tmp_path / "r.mp4")
    frame = next(source.frames())
    assert (source.height, source.width) == (frame.height, frame.width) == (48, 32)
    upright = np.rot90(pattern(0).astype(int))
    assert np.abs(frame.pixels.numpy() - upright).mean() < 5 < np.abs(frame.pixels.numpy() - upright[::-1, ::-1]).mean()


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True)])
def test_a_video_is_shown_as_its_matrix_says(tmp_path: Path, rotation: int, flips: tuple[bool, bool]) -> None:
    across, down = flips
    with av.open(str(tmp_path / "m.mp4"), "w") as container:
        made = container.add_stream("libx264", rate=25, options={"crf": "4"})
        made.width, made.height, made.pix_fmt = 48, 32, "yuv444p"
        made.set_display_rotation(rotation, hflip=across, vflip=down)
        picture = av.VideoFrame.from_ndarray(pattern(0), format="rgb24")
        container.mux([*made.encode(picture), *made.encode(None)])
    shown = np.rot90(pattern(0).astype(int), rotation // 90)
    shown = shown[:: -1 if down else 1, :: -1 if across else 1]
    source = VideoFile(tmp_path / "m.mp4")
    frame = next(source.frames())
    assert (source.height, source.width) == (frame.height, frame.width) == shown.shape[:2]
    assert np.abs(frame.pixels.numpy() - shown).mean() < 5


@pytest.mark.parametrize("size", [(35, 51), (90, 61), (301, 200)])
@pytest.mark.parametrize("rotation", [0, 90])
@pytest.mark.parametrize("pixel_format", ["yuv444p", "yuv420p", "yuv420p10le", "gray"])
def test_a_size_is_what_scaling_the_whole_frame_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], rotation: int, pixel_format: str
) -> None:
    make_clip(tmp_path / "s.mp4", frames=2, size=(160, 120), rotation=rotation, pixel_format=pixel_format)
    scaled = list[np.ndarray]()
    for threads in (1, 3):
        monkeypatch.setattr("redline.stream.sources.video_file.conversion_threads", lambda _, given=threads: given)
        scaled.append(next(VideoFile(tmp_path / "s.mp4", size=size).frames()).pixels.numpy())
    assert np.array_equal(*scaled)
    whole = Image.fromarray(next(VideoFile(tmp_path / "s.mp4").frames()).pixels.numpy())
    expected = np.asarray(whole.resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
    off = np.abs(scaled[0] - expected)
    assert off.mean() < 0.7 and np.quantile(off, 0.99) <= 6
    assert np.abs(np.roll(scaled[0], 1, axis=1) - expected).mean() > 1, "a picture that is a pixel off is seen"


@pytest.mark.parametrize("size", [None, (8, 8)])
def test_frames_that_cannot_be_shown_are_reported_before_the_start(
    tmp_path: Path, size: tuple[int, int] | None
) -> None:
    with av.open(str(tmp_path / "four_bits.nut"), "w") as container:
        made = container.add_stream("rawvideo", rate=25)
        made.width, made.height, made.pix_fmt = 16, 16, "bgr4"
        container.mux(made.encode(av.VideoFrame(16, 16, "bgr4")))
        container.mux(made.encode(None))
    for opened in (VideoFile, lambda path, size: LiveInput(Address(str(path), "'a'"), size=size)):
        with pytest.raises(RedlineError, match=r"^frames in bgr4 cannot be converted to RGB: .*\.$"):
            opened(tmp_path / "four_bits.nut", size=size)


def test_a_size_that_swscale_refuses_is_reached_all_the_same(tmp_path: Path) -> None:
    make_clip(tmp_path / "wide.mp4", frames=2, size=(4000, 8))
    assert next(VideoFile(tmp_path / "wide.mp4", size=(513, 17)).frames()).pixels.shape == (8, 4000, 3)
    with closing(open_source(str(tmp_path / "wide.mp4"), EndpointOptions(size=(513, 17)))) as source:
        assert {frame.pixels.shape for frame in source.frames()} == {(513, 17, 3)}


def test_what_pyav_does_not_know_of_a_frame_does_not_keep_it_from_being_upright() -> None:
    class Newer:
        """A frame with side data of a kind that this PyAV does not know."""

        rotation = 90

        @property
        def side_data(self) -> None:
            raise ValueError("99 is not a valid Type")

    assert (_turned(pattern(0), Newer()) == np.rot90(pattern(0))).all()


@pytest.mark.parametrize(("transfer", "curve"), [(16, "PQ"), (18, "HLG"), (1, None)])
def test_hdr_is_noted(tmp_path: Path, transfer: int, curve: str | None) -> None:
    make_clip(tmp_path / "h.mp4", frames=2, pixel_format="yuv420p10le", colour=(9, 9, transfer, 1))
    said = f"'h.mp4' is HDR ({curve}) and is not tone-mapped: its colours look pale."
    assert VideoFile(tmp_path / "h.mp4").notes == ((said,) if curve else ())
    camera = LiveInput(Address(f"file:{tmp_path / 'h.mp4'}", "'h.mp4'"))
    camera.close()
    assert camera.notes == ((said,) if curve else ())


def test_broadcast_videos_say_where_they_begin(tmp_path: Path) -> None:
    make_clip(tmp_path / "b.ts", frames=3)
    source = VideoFile(tmp_path / "b.ts")
    assert next(source.frames()).time_s == source.origin_s > 0


def test_closing_ends_the_frames(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mp4", frames=9)
    source = VideoFile(tmp_path / "a.mp4")
    seen = 0
    for _ in source.frames():
        seen += 1
        source.close()
    assert seen == 1


def test_what_is_no_video_is_reported(tmp_path: Path) -> None:
    def sentence(path: Path) -> str:
        with pytest.raises(RedlineError) as caught:
            VideoFile(path)
        return str(caught.value)

    assert sentence(tmp_path / "none.mp4").endswith("does not exist.")
    assert sentence(tmp_path) == f"cannot read {str(tmp_path)!r}: Is a directory."
    (tmp_path / "empty.mp4").touch()
    assert sentence(tmp_path / "empty.mp4") == "'empty.mp4' is empty."
    (tmp_path / "text.mp4").write_text("no film at all " * 50)
    assert (
        sentence(tmp_path / "text.mp4")
        == "'text.mp4' is not a readable video, or it is truncated and its index is missing."
    )
    with av.open(str(tmp_path / "song.m4a"), "w", format="mp4") as song:
        stream = song.add_stream("aac", rate=48000, layout="mono")
        heard = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        heard.sample_rate = 48000
        song.mux([*stream.encode(heard), *stream.encode(None)])
    assert sentence(tmp_path / "song.m4a") == "'song.m4a' has no video stream."
    make_clip(tmp_path / "whole.mp4", frames=9)
    data = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    assert "'cut.mp4' is not a readable video" in sentence(tmp_path / "cut.mp4")
    unknown = data.replace(b"avc1", b"zzz9").replace(b"avcC", b"free")
    (tmp_path / "codec.mp4").write_bytes(unknown)
    assert sentence(tmp_path / "codec.mp4") == "there is no decoder for the video codec of 'codec.mp4'."


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.avi"])
def test_what_is_left_of_a_video_does_not_hang_on_threads(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder with few threads reports a partial frame; with many it does not."""
    index = {"movflags": "+faststart"} if name.endswith("mp4") else {}
    options = {"preset": "ultrafast", "g": "1", "crf": "5"}
    make_clip(tmp_path / name, frames=60, size=(160, 128), muxer=index, options=options)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
    found = []
    for threads in (1, 3, 16):
        monkeypatch.setattr("redline.video.reading._threads", lambda pixels, each, threads=threads: threads)
        source = VideoFile(tmp_path / name, drop=lambda cause: None)
        found.append([frame.time_s for frame in source.frames()])
    assert found[0] == found[1] == found[2] and 30 < len(found[0]) < 60


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
def test_what_follows_a_damaged_frame_near_the_end_is_shown(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frame threads end silently at this damage."""
    options = {"preset": "ultrafast", "g": "1", "crf": "5"}
    times = make_clip(tmp_path / name, frames=60, size=(160, 128), options=options)
    with av.open(str(tmp_path / name)) as container:
        packet = [packet for packet in container.demux(container.streams.video[0]) if packet.size][50]
        # Behind what Matroska has before a picture, and its first numbers.
        begin, end = packet.pos + 40, packet.pos + packet.size
    data = bytearray((tmp_path / name).read_bytes())
    data[begin:end] = bytes(end - begin)
    (tmp_path / name).write_bytes(data)
    for threads in (1, 3, 16):
        monkeypatch.setattr("redline.video.reading._threads", lambda pixels, each, threads=threads: threads)
        with pytest.raises(RedlineError, match=r"cannot be decoded|is damaged"):
            list(VideoFile(tmp_path / name).frames())
        dropped: list[str] = []
        shown = [frame.time_s for frame in VideoFile(tmp_path / name, drop=dropped.append).frames()]
        assert dropped == ["damaged"] and len(shown) == 59 and shown[-1] == max(times)


def test_damage_in_the_middle_is_reported_and_not_shown(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=30, options={"preset": "ultrafast", "g": "1", "crf": "5"})
    data = bytearray((tmp_path / "a.mkv").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 900] = bytes(900)
    (tmp_path / "a.mkv").write_bytes(data)
    with pytest.raises(RedlineError, match=r"'a\.mkv'.*\.$"):
        list(VideoFile(tmp_path / "a.mkv").frames())


@pytest.mark.parametrize(("name", "sound"), [("a.mkv", "aac"), ("b.mkv", None), ("c.webm", None)])
def test_a_damaged_video_is_never_cut_short_without_a_word(tmp_path: Path, name: str, sound: str | None) -> None:
    """After losing synchronization, the Matroska demuxer continues elsewhere or ends silently."""
    codec = "libvpx" if name.endswith("webm") else "libx264"
    make_clip(tmp_path / name, frames=60, size=(96, 64), codec=codec, sound=sound)
    data, told = (tmp_path / name).read_bytes(), set()
    # In many places: in most of them a picture is damaged and nothing is lost, and where not, hangs on the encoder.
    for place in range(4, 36):
        damaged, start = bytearray(data), len(data) * place // 40
        damaged[start : start + 2000] = bytes(range(256)) * 7 + bytes(208)
        (tmp_path / name).write_bytes(damaged[: len(data)])
        try:
            assert len(list(VideoFile(tmp_path / name).frames())) == 60
        except RedlineError as error:
            told.add(re.sub(r"\d+\.\d s", "", str(error)))
    missing = {f"{name!r} is damaged at : frames are missing.", f"{name!r} is damaged: it cannot be read after ."}
    assert told & missing


DAMAGES = {
    "zeros": lambda data, start: data[:start] + bytes(2000) + data[start + 2000 :],
    "noise": lambda data, start: data[:start] + np.random.default_rng(start).bytes(2000) + data[start + 2000 :],
    "cut out": lambda data, start: data[:start] + data[start + 2000 :],
}


@pytest.mark.parametrize(
    ("name", "codec", "sound"),
    [
        ("a.ts", "libx264", None),
        ("b.ts", "libx264", "aac"),
        ("a.avi", "libx264", None),
        ("b.avi", "ffv1", "mp3"),
        ("c.avi", "mjpeg", None),
    ],
)
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_in_recordings_and_in_avi_is_reported_with_its_place(
    tmp_path: Path, name: str, codec: str, sound: str | None, damage: str
) -> None:
    """These demuxers continue after a gap silently, and AVI without a gap in its timestamps."""
    film = tmp_path / name
    clock = {"time_base": Fraction(1, 25)} if film.suffix == ".avi" else {}
    form = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    make_clip(film, frames=60, size=(96, 64), codec=codec, sound=sound, pixel_format=form, **clock)
    assert len(list(VideoFile(film).frames())) == 60
    whole, found = film.read_bytes(), 0
    for tenths in (4, 5, 6, 7):
        film.write_bytes(DAMAGES[damage](whole, len(whole) * tenths // 10))
        left_out: list[str] = []
        came = list(VideoFile(film, drop=left_out.append).frames())
        if damage == "cut out" and film.suffix == ".avi":
            # Its index is wrong from there on, and its length tells.
            with pytest.raises(DamagedVideo, match=r"is truncated: 2,000 bytes are missing at its end\.$"):
                VideoFile(film)
            found += 1
            continue
        if not left_out:
            # A hole in the sound, or one that the pictures get over.
            assert len(came) == 60
            continue
        found += 1
        assert set(left_out) <= {"damaged", "missing"} and abs(len(came) + len(left_out) - 60) <= 2, left_out
        with pytest.raises(RedlineError, match=rf"'{name}'.*(damaged at \d\.\d s|cannot be decoded|read behind)"):
            list(VideoFile(film).frames())
    assert found >= 2


def test_an_index_that_names_the_headers_of_frames_tells_the_place_too(tmp_path: Path) -> None:
    """FFmpeg writes such an index; the demuxer returns the positions after the headers."""
    film, options = tmp_path / "a.avi", {"preset": "ultrafast", "g": "1", "crf": "5"}
    make_clip(film, frames=60, size=(160, 128), options=options)
    with av.open(str(film)) as container:
        places = [packet.pos for packet in container.demux(container.streams.video[0]) if packet.size]
    data = bytearray(film.read_bytes())
    data[places[40] - 8 : places[43]] = bytes(places[43] - places[40] + 8)
    film.write_bytes(data)
    with pytest.raises(RedlineError, match=r"^'a\.avi' is damaged at 1\.6 s: frames are missing\.$"):
        list(VideoFile(film).frames())


def test_frames_that_are_skipped_in_avi_on_purpose_are_no_damage(tmp_path: Path) -> None:
    """AVI stores an empty packet for each such frame."""
    ticks = [0, 1, 2, 300, 301, 700]
    make_clip(tmp_path / "a.avi", pts=ticks, time_base=Fraction(1, 25), codec="mpeg4", sound="mp3")
    assert [frame.pts for frame in VideoFile(tmp_path / "a.avi").frames()] == ticks


def test_recordings_that_were_concatenated_are_no_damage(tmp_path: Path) -> None:
    """The packet counter restarts there, which marks an intact packet as corrupt."""
    make_clip(tmp_path / "a.ts", frames=30, options={"bf": "0"})
    make_clip(tmp_path / "b.ts", pts=[15_360 + 512 * number for number in range(30)], options={"bf": "0"})
    joined = b"".join((tmp_path / name).read_bytes() for name in ("a.ts", "b.ts"))
    (tmp_path / "c.ts").write_bytes(joined)
    assert len(list(VideoFile(tmp_path / "c.ts").frames())) == 60


def test_a_video_that_is_looked_at_goes_on_after_what_is_damaged(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=30, options={"preset": "ultrafast", "g": "1", "crf": "5"})
    data = bytearray((tmp_path / "a.mkv").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 900] = bytes(900)
    (tmp_path / "a.mkv").write_bytes(data)
    for options in (EndpointOptions(keep_going=True), EndpointOptions(live=True), EndpointOptions()):
        left_out: list[str] = []
        source = open_source(str(tmp_path / "a.mkv"), options, left_out.append)
        if options == EndpointOptions():
            with pytest.raises(RedlineError, match=r"'a\.mkv'"):
                list(source.frames())
            assert not left_out
            continue
        came = list(source.frames())
        late = left_out.count("source late")
        assert 20 <= len(came) + late < 30 and len(left_out) - late >= 1


def test_a_frame_that_is_seen_for_long_is_no_damage(tmp_path: Path) -> None:
    ticks = [0, 512, 1024, 90_000, 90_512, 400_000]
    make_clip(tmp_path / "a.mkv", pts=ticks, sound="aac")
    assert len(list(VideoFile(tmp_path / "a.mkv").frames())) == 6


def test_frames_of_another_size_during_a_stream_come_in_the_one_that_is_asked_for(tmp_path: Path) -> None:
    for name, size in (("a.ts", (64, 48)), ("b.ts", (96, 80))):
        make_clip(tmp_path / name, frames=6, size=size)
    (tmp_path / "both.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    assert {frame.pixels.shape for frame in VideoFile(tmp_path / "both.ts").frames()} == {(48, 64, 3), (80, 96, 3)}
    frames = list(VideoFile(tmp_path / "both.ts", size=(40, 56)).frames())
    assert len(frames) == 12 and {frame.pixels.shape for frame in frames} == {(40, 56, 3)}
    right = np.asarray(Image.fromarray(pattern(0, 96, 80)).resize((56, 40), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(frames[6].pixels.numpy() - right).mean() < 6
