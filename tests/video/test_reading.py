"""Opening a local video opens no other file."""

from fractions import Fraction
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.stream.sinks.audio import check_audio_copy
from redline.video.reading import main_stream, opened
from upscale.video.clips import make_clip

REFUSED = r"^'.*' is a playlist, which is not supported: give the video file itself\.$"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n"),
        ("list.ffconcat", "ffconcat version 1.0\nfile other.mp4\n"),
        ("list.mkv", "ffconcat version 1.0\nfile other.mp4\n"),
        ("list.mp4", "#EXTM3U\n#EXTINF:1,\n{other}\n"),
        ("list.ts", "\ufeff#EXTM3U\n#EXTINF:1,\n{other}\n"),
        ("list.mpd", '<?xml version="1.0"?>\n<!-- a > b -->\n<MPD type="static"><BaseURL>{other}</BaseURL></MPD>'),
    ],
)
def test_a_playlist_opens_no_other_file(tmp_path: Path, name: str, text: str) -> None:
    make_clip(tmp_path / "other.mp4", frames=3, sound="aac")
    path = tmp_path / name
    path.write_text(text.format(other=tmp_path / "other.mp4"))
    with pytest.raises(RedlineError, match=REFUSED), opened(path):
        pass
    with pytest.raises(RedlineError, match=REFUSED):
        check_audio_copy(path, "matroska", ".mkv")


def test_an_image_sequence_pattern_opens_no_other_file(tmp_path: Path) -> None:
    for number in range(3):
        make_clip(tmp_path / f"frame{number}.png", frames=1, codec="png", pixel_format="rgb24")
    (tmp_path / "frame%d.png").write_bytes((tmp_path / "frame0.png").read_bytes())
    with pytest.raises(RedlineError), opened(tmp_path / "frame%d.png"):
        pass


@pytest.mark.parametrize(
    "suffix", [".mp4", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mpg", ".flv", ".nut", ".gif", ".jpg"]
)
def test_usual_containers_are_read(tmp_path: Path, suffix: str) -> None:
    codec = {".webm": "libvpx", ".gif": "gif", ".mpg": "mpeg2video", ".jpg": "mjpeg"}.get(suffix, "libx264")
    path = tmp_path / f"100% a:b{suffix}"
    pixel_format = {"gif": "bgr8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
    frames, clock = 1 if codec == "mjpeg" else 3, Fraction(1, 25)
    make_clip(path, frames=frames, codec=codec, pixel_format=pixel_format, time_base=clock)
    with opened(path) as container:
        assert main_stream(container, path).width == 48
