"""Opens a local camera through Video4Linux."""

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
    """The mode requested from a camera, which may not support it.

    `size` is (height, width). `pixel_format` is `mjpeg` or `yuyv422`; only `mjpeg` is fast at large sizes.
    """

    size: tuple[int, int] | None = None
    rate: Fraction | None = None
    pixel_format: str | None = None

    @property
    def options(self) -> dict[str, str]:
        options = {
            "video_size": None if self.size is None else f"{self.size[1]}x{self.size[0]}",
            "framerate": None if self.rate is None else str(self.rate),
            "input_format": self.pixel_format,
        }
        return {name: value for name, value in options.items() if value is not None}


def open_webcam(
    device: str | int = 0,
    clock: Clock | None = None,
    mode: CameraMode | None = None,
    drop: Callable[[str], None] = lambda cause: None,
    size: tuple[int, int] | None = None,
) -> LiveInput:
    """Opens a camera by its number or device file.

    The driver selects the nearest supported mode. If it differs from the request, a note says so.
    """
    if not sys.platform.startswith("linux"):
        raise RedlineError("webcam needs Video4Linux, which only Linux has: use browser as the source.")
    path = _DEVICES / f"video{device}" if isinstance(device, int) else Path(device)
    if not path.exists():
        cameras = sorted(str(found) for found in _DEVICES.glob("video*"))
        raise RedlineError(f"there is no camera {str(path)!r} (found: {', '.join(cameras) or 'none'}).")
    if not path.is_char_device():
        raise RedlineError(f"{str(path)!r} is not a camera.")
    mode = mode or CameraMode()
    address = Address(str(path), f"the camera {str(path)!r}", "video4linux2", mode.options, is_live=True)
    camera = LiveInput(address, clock, drop, size)
    given, rate = camera.sent_size, camera.rate
    if mode.size not in (None, given) or mode.rate not in (None, rate):
        camera.notes += (
            f"{camera.name} sends {given[1]}×{given[0]} at {float(rate):g} frames/s instead of the requested mode.",
        )
    return camera
