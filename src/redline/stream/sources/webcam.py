"""A camera of this machine, through Video4Linux."""

import sys
from pathlib import Path

from redline.errors import RedlineError
from redline.stream.clock import Clock
from redline.stream.sources.live_input import Address, LiveInput

_DEVICES = Path("/dev")


def open_webcam(device: str | int = 0, clock: Clock | None = None) -> LiveInput:
    """By its number, or by its file."""
    if not sys.platform.startswith("linux"):
        raise RedlineError("cameras are read through Video4Linux, which only Linux has: use a browser as the source.")
    path = _DEVICES / f"video{device}" if isinstance(device, int) else Path(device)
    if not path.exists():
        there = sorted(str(found) for found in _DEVICES.glob("video*"))
        raise RedlineError(f"there is no camera {str(path)!r}: {' and '.join(there) or 'none'} can be seen.")
    if not path.is_char_device():
        raise RedlineError(f"{str(path)!r} is no camera.")
    return LiveInput(Address(str(path), f"the camera {str(path)!r}", "video4linux2", is_live=True), clock)
