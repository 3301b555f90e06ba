"""Shows the stream on this machine: in a Tk window, or as a virtual camera that other programs can open."""

from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from redline.errors import RedlineError, first_line
from redline.stream.frames import Frame, as_square_pixels
from redline.stream.sinks import Sink

_INSTEAD = "use browser, mjpeg or a file as output"


class WindowSink(Sink):
    """Shows frames in a window. Tk allows only one thread, so the writing thread also creates and closes the window."""

    name = "window"

    def __init__(self) -> None:
        if find_spec("tkinter") is None:
            raise RedlineError(f"window needs Python's tkinter, which is not installed: {_INSTEAD}.")
        self._tk: Any = import_module("tkinter")
        try:
            # Opens a window now so that a missing display is reported before anything starts.
            self._tk.Tk().destroy()
        except self._tk.TclError as error:
            raise RedlineError(f"cannot open a window ({error}): {_INSTEAD}.") from error
        self.on_closed: Callable[[], None] = lambda: None
        self._window: Any = None
        self._label: Any = None
        self._image: Any = None
        self._is_closed = False

    def write(self, frame: Frame) -> None:
        if self._is_closed:
            return
        if self._window is None:
            self._open()
        image_tk: Any = import_module("PIL.ImageTk")
        # Keeps a reference to the image, because Tk does not: otherwise the image is freed and the window becomes
        # empty.
        window: Any = self._window
        self._image = image_tk.PhotoImage(as_square_pixels(frame), master=window)
        self._label.configure(image=self._image)
        window.update()

    def idle(self) -> None:
        """Handles events while there is no frame, so that the window can be moved and closed."""
        if self._window is not None:
            self._window.update()

    def close(self, complete: bool = True) -> None:
        if self._window is not None:
            self._image = self._label = None
            self._window.destroy()
            self._window = None

    def _open(self) -> None:
        self._window = self._tk.Tk()
        self._window.title("Redline")
        self._window.protocol("WM_DELETE_WINDOW", self._on_delete)
        self._label = self._tk.Label(self._window, borderwidth=0)
        self._label.pack()

    def _on_delete(self) -> None:
        self._is_closed = True
        self.on_closed()


class VirtualCameraSink(Sink):
    """Shows frames as a virtual camera, which appears with the first frame and keeps its size."""

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
            advice = "on Linux load v4l2loopback, elsewhere install OBS"
            raise RedlineError(f"cannot open a virtual camera ({first_line(error)}): {advice}.") from error
