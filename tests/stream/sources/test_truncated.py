"""A video whose end is missing never passes for a whole one."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from redline.stream.latency import Latency
from redline.stream.places import Wishes, open_places, open_source
from redline.stream.settings import LiveSettings
from redline.stream.sources.video_file import DamagedFilm, VideoFile
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
    with pytest.raises(DamagedFilm, match=rf"^{name!r} is cut off: [0-9,]+ bytes are missing at its end\.$"):
        open_source(str(tmp_path / name))
    latency = Latency()
    places = open_places(str(tmp_path / name), "null", Wishes(keep_going=True), LiveSettings(), latency)
    assert [note.partition(":")[0] for note in places.notes] == [f"{name!r} is cut off"]
    shown, missing = len(list(places.source.frames())), latency.report().drops["missing"]
    # A container that declares its duration tells how many; one that is cut in half, or waits for its next, is neither.
    assert 30 <= shown < 60 and (58 <= shown + missing <= 60 if name in ("a.mkv", "a.mp4") else missing >= 1)


def test_a_fragmented_video_whose_last_fragments_are_missing_is_truncated(tmp_path: Path) -> None:
    """It ends with a whole fragment, and only the duration at its start tells."""
    options = {"g": "10", "preset": "ultrafast"}
    make_clip(tmp_path / "a.mp4", frames=50, options=options, muxer={"movflags": "+dash+global_sidx"})
    assert len(list(VideoFile(tmp_path / "a.mp4").frames())) == 50
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data[: data.rindex(b"moof") - 4])
    with pytest.raises(DamagedFilm, match=r"^'a\.mp4' is damaged: it cannot be read behind 1\.6 s\.$"):
        list(VideoFile(tmp_path / "a.mp4").frames())
    dropped: list[str] = []
    assert len(list(VideoFile(tmp_path / "a.mp4", drop=dropped.append).frames())) == 40 and dropped == ["missing"] * 10
