"""Local cameras: missing ones, and modes that they do not support."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from patience import HANGS_S
from redline.errors import RedlineError
from redline.stream.sources.live_input import Address, CameraMode, open_webcam

pytestmark = pytest.mark.timeout(HANGS_S)


def test_missing_cameras_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.sources.live_input._DEVICES", tmp_path)
    with pytest.raises(RedlineError, match=r"^there is no camera '.*video3' \(found: none\)\.$"):
        open_webcam(3)
    (tmp_path / "video0").touch()
    with pytest.raises(RedlineError, match=r"^there is no camera '.*video1' \(found: .*video0\)\.$"):
        open_webcam(1)
    with pytest.raises(RedlineError, match=r"video0' is not a camera\.$"):
        open_webcam(0)
    with pytest.raises(RedlineError, match=r"^the camera '/dev/null' cannot be opened: .*\.$"):
        open_webcam("/dev/null")
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(RedlineError, match=r"only Linux has"):
        open_webcam(0)


def test_a_camera_that_gives_something_else_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Address] = []

    def opened(address: Address, clock: object, drop: object, size: object) -> SimpleNamespace:
        made.append(address)
        return SimpleNamespace(name=address.name, sent_size=(480, 640), rate=30, notes=())

    monkeypatch.setattr("redline.stream.sources.live_input.LiveInput", opened)
    for asked, is_told in (
        (None, False),
        (CameraMode((480, 640), Fraction(30)), False),
        (CameraMode((720, 1280)), True),
        (CameraMode(rate=Fraction(60), pixel_format="mjpeg"), True),
    ):
        camera = open_webcam("/dev/null", mode=asked)
        said = "the camera '/dev/null' sends 640×480 at 30 frames/s instead of the requested mode."
        assert camera.notes == ((said,) if is_told else ())
    assert made[-1].options == {"framerate": "60", "input_format": "mjpeg"} and made[-1].is_live
