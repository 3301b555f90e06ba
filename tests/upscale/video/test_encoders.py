"""The encoder for a video: its pixel format, its options, and what it does not keep."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from av.video.format import VideoFormat

from redline.errors import RedlineError
from redline.upscale.video import encoders
from redline.upscale.video.encoders import _check_crf, _codec, _options, _pixel_format, check_encoding, choose_encoder
from redline.upscale.video.pixels import BT709, RGB, Colour
from redline.upscale.video.settings import VideoSettings

EVERYTHING = [f"yuv{chroma}p{bits}" for chroma in (420, 422, 444) for bits in ("", "10le", "12le")]


@pytest.fixture
def offering(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`offering(names)`: encoders take these pixel formats, and all of them are installed."""

    def offer(names: list[str]) -> None:
        formats = [SimpleNamespace(name=name) for name in (*names, "nv12")]
        monkeypatch.setattr(
            encoders, "Codec", lambda name, mode: SimpleNamespace(video_formats=formats, is_encoder=True)
        )

    offer(EVERYTHING)
    return offer


@pytest.mark.usefixtures("offering")
@pytest.mark.parametrize(
    ("source", "codec", "chosen"),
    [
        ("yuv420p", "h264", "yuv420p"),
        ("yuv422p", "h264", "yuv422p"),
        ("yuv444p10le", "h264", "yuv444p10le"),
        ("yuv411p", "h264", "yuv422p"),
        ("yuv410p", "h264", "yuv420p"),
        ("gray", "hevc", "yuv420p"),
        ("gray10le", "hevc", "yuv420p10le"),
        ("rgb24", "h264", "yuv420p"),
        ("rgb24", "hevc", "yuv444p"),
        ("pal8", "hevc", "yuv444p"),
        ("yuv420p", "ffv1", "bgr0"),
        ("yuv420p10le", "ffv1", "gbrp10le"),
        ("yuv420p12le", "ffv1", "gbrp12le"),
    ],
)
def test_the_pixel_format_is_the_nearest_to_the_videos(source: str, codec: str, chosen: str) -> None:
    assert _pixel_format(codec, "any", VideoFormat(source)) == (chosen, [])


def test_chroma_comes_before_bits_and_what_is_lost_is_told(offering: Any) -> None:
    offering(["yuv420p10le", "yuv444p"])
    note = "the video has 10 bits per colour and hevc keeps 8"
    assert _pixel_format("hevc", "any", VideoFormat("yuv422p10le")) == ("yuv444p", [note])
    offering(["yuv420p", "yuv420p10le"])
    assert _pixel_format("hevc", "any", VideoFormat("yuv444p")) == ("yuv420p", [])
    note = "the video has 16 bits per colour and ffv1 keeps 12"
    assert _pixel_format("ffv1", "any", VideoFormat("yuv420p16le")) == ("gbrp12le", [note])


def video(width: int, height: int, pixel_format: str = "yuv420p", matrix: int = BT709) -> Any:
    return SimpleNamespace(width=width, height=height, pixel_format=pixel_format, colour=Colour(matrix, 1, 1, False))


@pytest.mark.usefixtures("offering")
@pytest.mark.parametrize(
    ("size", "pixel_format", "padded"),
    [
        ((9, 7), "yuv420p", (1, 1)),
        ((9, 7), "yuv422p", (1, 0)),
        ((9, 7), "yuv444p", (0, 0)),
        ((8, 7), "yuv420p", (0, 1)),
        ((8, 6), "yuv420p", (0, 0)),
    ],
)
def test_odd_sides_are_padded_where_chroma_is_halved(
    size: tuple[int, int], pixel_format: str, padded: tuple[int, int]
) -> None:
    given = VideoSettings(codec="hevc")
    found, notes = choose_encoder(given, video(*size, pixel_format), Path("a.mp4"), 3)
    assert found.padded == tuple(pad if side * 3 % 2 else 0 for pad, side in zip(padded, size, strict=True))
    assert (found.width, found.height) == (size[0] * 3 + found.padded[0], size[1] * 3 + found.padded[1])
    assert any("is odd" in note for note in notes) is any(found.padded)
    assert choose_encoder(given, video(*size, pixel_format), Path("a.mp4"), 2)[0].padded == (0, 0)


@pytest.mark.usefixtures("offering")
def test_what_is_not_kept_is_told() -> None:
    def notes(codec: str, pixel_format: str, matrix: int = BT709, name: str = "a.mkv") -> str:
        found, said = choose_encoder(VideoSettings(codec=codec), video(8, 8, pixel_format, matrix), Path(name), 2)
        assert found.colour.full_range is (codec == "ffv1")
        return "; ".join(said)

    assert notes("h264", "yuv420p") == "" and "plays on few devices" in notes("h264", "yuv444p")
    assert "plays on few" not in notes("hevc", "yuv444p")
    assert "is written as YUV with the BT.709 matrix" in notes("hevc", "rgb24", RGB)
    assert notes("ffv1", "rgb24", RGB) == ""
    with pytest.raises(RedlineError, match=r"\.mp4 cannot hold ffv1: choose \.mkv"):
        notes("ffv1", "yuv420p", name="a.mp4")


@pytest.mark.parametrize(("codec", "worst"), [("h264", 51), ("hevc", 51)])
def test_a_crf_is_taken_up_to_the_worst(codec: str, worst: float) -> None:
    for crf in (None, 0, worst):
        _check_crf(crf, codec)
    for crf in (-0.1, worst + 0.1):
        with pytest.raises(RedlineError, match="crf must be between 0 and"):
            _check_crf(crf, codec)
    with pytest.raises(RedlineError, match="has no crf"):
        _check_crf(20, "ffv1")


@pytest.mark.usefixtures("offering")
def test_what_can_be_said_before_there_is_a_video() -> None:
    check_encoding(VideoSettings())
    check_encoding(VideoSettings(crf=63))
    for wrong in ({"crf": 64}, {"codec": "h264", "crf": 52}, {"codec": "nothing"}):
        with pytest.raises(RedlineError):
            check_encoding(VideoSettings(**wrong))


@pytest.mark.parametrize(("flags", "limited"), [(set(), False), ({"avx512f"}, True)])
def test_options_of_the_encoder(flags: set[str], limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "hardware_flags", lambda: flags)
    layout = VideoFormat("yuv420p")

    def options(codec: str, layout: VideoFormat = layout, **values: Any) -> dict[str, str]:
        return _options(codec, encoders._KINDS[codec], VideoSettings(codec=codec, **values), layout)

    assert ("x264-params" in options("h264")) is limited and "x264-params" not in options("hevc")
    assert options("h264", crf=12.5)["crf"] == "12.5" and options("h264")["crf"] == f"{encoders._KINDS['h264'].crf:g}"
    assert options("h264")["preset"] == "medium" and options("vp9")["cpu-used"] == "3"
    assert options("prores", VideoFormat("yuv422p10le"))["profile"] == "hq"
    assert options("prores", VideoFormat("yuv444p10le"))["profile"] == "4444"


def test_the_first_codec_that_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "available_codecs", lambda: ["h264", "mpeg4"])
    assert _codec("auto", "mp4") == ("h264", [])
    monkeypatch.setattr(encoders, "available_codecs", lambda: ["mpeg4"])
    assert _codec("auto", "mp4")[0] == "mpeg4" and "looks worse" in _codec("auto", "mp4")[1][0]
    with pytest.raises(RedlineError, match="unknown codec 'h264': choose mpeg4"):
        _codec("h264", "mp4")
    monkeypatch.setattr(encoders, "available_codecs", list)
    with pytest.raises(RedlineError, match="has no encoder for mp4: it needs"):
        _codec("auto", "mp4")
