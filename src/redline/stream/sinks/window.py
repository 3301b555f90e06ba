"""A window on this machine's screen, with nothing but Python's own Tk. Closing it ends the stream."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from redline.errors import RedlineError
from redline.stream.frames import Frame
from redline.stream.sinks.square_pixels import as_square_pixels

_INSTEAD = "show the stream in a browser, as mjpeg, or write a file"


class WindowSink:
    """Tk belongs to one thread: the window is made, drawn and closed by the one that writes frames."""

    name = "window"
    takes_new_size = True

    def __init__(self, title: str = "Redline", on_closed: Callable[[], None] = lambda: None) -> None:
        if find_spec("tkinter") is None:
            raise RedlineError(f"a window needs Python's tkinter, which is not installed: {_INSTEAD}.")
        self._tk: Any = import_module("tkinter")
        try:
            # Tried out now, so that a missing screen is said before anything starts.
            self._tk.Tk().destroy()
        except self._tk.TclError as error:
            raise RedlineError(f"no window can be opened ({error}): {_INSTEAD}.") from error
        self._title, self.on_closed = title, on_closed
        self._window: Any = None
        self._label: Any = None
        self._picture: Any = None
        self._is_closed = False

    def write(self, frame: Frame) -> None:
        if self._is_closed:
            return
        if self._window is None:
            self._open()
        picture: Any = import_module("PIL.ImageTk")
        # Tk does not hold the picture: without this name it would be gone, and the window empty.
        window: Any = self._window
        self._picture = picture.PhotoImage(as_square_pixels(frame), master=window)
        self._label.configure(image=self._picture)
        window.update()

    def idle(self) -> None:
        """It answers while nothing comes: it can be moved, and closed."""
        if self._window is not None:
            self._window.update()

    def close(self, whole: bool = True) -> None:
        if self._window is not None:
            self._picture = self._label = None
            self._window.destroy()
            self._window = None

    def abandon(self) -> None:
        self.close()

    def _open(self) -> None:
        self._window = self._tk.Tk()
        self._window.title(self._title)
        self._window.protocol("WM_DELETE_WINDOW", self._ended)
        self._label = self._tk.Label(self._window, borderwidth=0)
        self._label.pack()

    def _ended(self) -> None:
        self._is_closed = True
        self.on_closed()
