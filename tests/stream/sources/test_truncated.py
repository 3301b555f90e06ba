"""A truncated video is always detected."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from redline.stream.endpoints import EndpointOptions, open_endpoints, open_source
from redline.stream.latency import Latency
from redline.stream.settings import LiveSettings
from redline.stream.sources.video_file import DamagedVideo, VideoFile
from upscale.video.clips import make_clip

CUT_OFF: dict[str, dict[str, Any]] = {
    "a.mkv": {},
    "live.mkv": {"muxer": {"live": "1"}},
    # The index is at the start here, as in videos that are made to be sent.
    "a.mp4": {"muxer": {"movflags": "+faststart"}},
    "a.avi": {"time_base": Fraction(1, 25)},
    "a.ts": {"sound": "mp2"},
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_a_truncated_video_is_an_error_or_its_end_is_counted_as_missing(tmp_path: Path, name: str) -> None:
    make_clip(tmp_path / name, frames=60, **CUT_OFF[name])
    assert VideoFile(tmp_path / name).notes == ()
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 3 // 4 - 1])
    with pytest.raises(DamagedVideo, match=rf"^{name!r} is truncated: [0-9,]+ bytes are missing at its end\.$"):
        open_source(str(tmp_path / name))
    latency = Latency()
    places = open_endpoints(str(tmp_path / name), "null", EndpointOptions(keep_going=True), LiveSettings(), latency)
    assert [note.partition(":")[0] for note in places.notes] == [f"{name!r} is truncated"]
    shown, missing = len(list(places.source.frames())), latency.report().drops["missing"]
    # A container that declares its duration tells how many; one that is cut in half, or waits for its next, is neither.
    assert 30 <= shown < 60 and (58 <= shown + missing <= 60 if name in ("a.mkv", "a.mp4") else missing >= 1)


def test_a_fragmented_video_whose_last_fragments_are_missing_is_truncated(tmp_path: Path) -> None:
    """The file ends with a complete fragment, so only its declared duration shows the truncation."""
    options = {"g": "10", "preset": "ultrafast"}
    make_clip(tmp_path / "a.mp4", frames=50, options=options, muxer={"movflags": "+dash+global_sidx"})
    assert len(list(VideoFile(tmp_path / "a.mp4").frames())) == 50
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data[: data.rindex(b"moof") - 4])
    with pytest.raises(DamagedVideo, match=r"^'a\.mp4' is damaged: it cannot be read after 1\.6 s\.$"):
        list(VideoFile(tmp_path / "a.mp4").frames())
    dropped: list[str] = []
    assert len(list(VideoFile(tmp_path / "a.mp4", drop=dropped.append).frames())) == 40 and dropped == ["missing"] * 10


@pytest.mark.parametrize("name", ["a.flv", "sound.flv", "a.ivf", "ticks.ivf"])
def test_a_video_that_ends_before_its_declared_end_is_truncated(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    codec, sound = "libvpx" if path.suffix == ".ivf" else "libx264", "aac" if name == "sound.flv" else None
    make_clip(path, frames=50, codec=codec, sound=sound)
    data = path.read_bytes()
    if name == "ticks.ivf":
        # Older writers declare the duration in ticks there, not the number of frames.
        data = data[:24] + (50 * 12800 // 25).to_bytes(4, "little") + data[28:]
        path.write_bytes(data)
    assert len(list(VideoFile(path).frames())) == 50
    with av.open(str(path)) as container:
        position = [packet.pos for packet in container.demux(video=0)][30]
    path.write_bytes(data[:position])
    with pytest.raises(DamagedVideo, match=rf"^{name!r} is damaged: it cannot be read after 1\.\d s\.$"):
        list(VideoFile(path).frames())
    dropped: list[str] = []
    shown = len(list(VideoFile(path, drop=dropped.append).frames()))
    assert 28 <= shown <= 30 and 48 <= shown + len(dropped) <= 50 and set(dropped) == {"missing"}


def test_an_flv_whose_audio_outlasts_its_frames_is_whole(tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=50, sound="aac")
    with av.open(str(tmp_path / "a.mkv")) as whole, av.open(str(tmp_path / "a.flv"), "w") as cut:
        streams = [cut.add_stream_from_template(stream) for stream in whole.streams]
        for packet in whole.demux():
            if packet.size and (packet.stream.type == "audio" or (packet.pts or 0) < 1000):
                packet.stream = streams[packet.stream.index]
                cut.mux(packet)
    assert 20 < len(list(VideoFile(tmp_path / "a.flv").frames())) < 30
