"""A camera of this machine, through Video4Linux, as it comes or as it was asked for."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from redline.errors import RedlineError
from redline.stream.clock import Clock
from redline.stream.sources.live_input import Address, LiveInput

_DEVICES = Path("/dev")


@dataclass(frozen=True)
class CameraMode:
    """What a camera is asked for, and may not be able to give. `size` is (height, width); `form` is that of the
    pictures on their way, `mjpeg` or `yuyv422`: large ones come quickly as the former alone."""

    size: tuple[int, int] | None = None
    rate: Fraction | None = None
    form: str | None = None

    @property
    def options(self) -> dict[str, str]:
        said = {
            "video_size": None if self.size is None else f"{self.size[1]}x{self.size[0]}",
            "framerate": None if self.rate is None else str(self.rate),
            "input_format": self.form,
        }
        return {name: value for name, value in said.items() if value is not None}


def open_webcam(
    device: str | int = 0,
    clock: Clock | None = None,
    asked: CameraMode | None = None,
    drop: Callable[[str], None] = lambda cause: None,
    size: tuple[int, int] | None = None,
) -> LiveInput:
    """By its number, or by its file. A driver gives the nearest that it can, which is noted; `drop` is told of pictures
    that came damaged, and all are brought to `size`."""
    if not sys.platform.startswith("linux"):
        raise RedlineError("cameras are read through Video4Linux, which only Linux has: use a browser as the source.")
    path = _DEVICES / f"video{device}" if isinstance(device, int) else Path(device)
    if not path.exists():
        there = sorted(str(found) for found in _DEVICES.glob("video*"))
        raise RedlineError(f"there is no camera {str(path)!r}: {' and '.join(there) or 'none'} can be seen.")
    if not path.is_char_device():
        raise RedlineError(f"{str(path)!r} is no camera.")
    asked = asked or CameraMode()
    address = Address(str(path), f"the camera {str(path)!r}", "video4linux2", asked.options, is_live=True)
    camera = LiveInput(address, clock, drop, size)
    given, rate = camera.sent_size, camera.rate
    if asked.size not in (None, given) or asked.rate not in (None, rate):
        camera.notes += (
            f"{camera.name} gives {given[1]}×{given[0]} at {float(rate):g} a second, not what was asked for.",
        )
    return camera
