"""A virtual camera that other programs can open, for example video calls. Needs the extra `virtual-camera`."""

from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from redline.errors import RedlineError
from redline.stream.frames import Frame, as_square_pixels
from redline.stream.sinks import Sink


class VirtualCameraSink(Sink):
    """The camera appears with the first frame and keeps its size."""

    name = "virtual camera"
    takes_new_size = False

    def __init__(self, rate: Fraction, device: str | None = None) -> None:
        if find_spec("pyvirtualcam") is None:
            install = "pip install 'redline[virtual-camera]'"
            raise RedlineError(f"a virtual camera needs pyvirtualcam: {install}.")
        self._rate, self._device = float(rate), device
        self._camera: Any = None

    def write(self, frame: Frame) -> None:
        image = as_square_pixels(frame)
        if self._camera is None:
            self._camera = self._open(image.height, image.width)
        self._camera.send(np.asarray(image))

    def close(self, complete: bool = True) -> None:
        if self._camera is not None:
            self._camera.close()
            self._camera = None

    def _open(self, height: int, width: int) -> Any:
        library: Any = import_module("pyvirtualcam")
        try:
            return library.Camera(width=width, height=height, fps=self._rate, device=self._device)
        except (RuntimeError, ValueError) as error:
            why = (str(error).strip().splitlines() or ["no reason is given"])[0].rstrip(".")
            raise RedlineError(
                f"cannot open a virtual camera ({why}): on Linux load v4l2loopback, elsewhere install OBS."
            ) from error
