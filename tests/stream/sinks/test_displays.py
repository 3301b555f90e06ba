"""The window and the virtual camera, with fakes of Tk and of the driver."""

import sys
import threading
from dataclasses import replace
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.pipeline import Pipeline
from redline.stream.sinks.displays import VirtualCameraSink, WindowSink
from redline.stream.sources.synthetic import SyntheticClip
from stream.doubles import Identity, ScriptedSource

FRAMES = list(SyntheticClip(6, 8, count=3).frames())


class FakeTk:
    """The part of Tk that the window uses."""

    TclError = RuntimeError
    has_screen = True

    def __init__(self) -> None:
        self.windows: list[Any] = []
        self.pictures: list[Any] = []

    def Tk(self) -> Any:
        if not self.has_screen:
            raise self.TclError("no display name and no $DISPLAY environment variable")
        window = SimpleNamespace(closing=None, updates=0, is_destroyed=False, title=lambda text: None)
        window.protocol = lambda name, call: setattr(window, "closing", call)
        window.update = lambda: setattr(window, "updates", window.updates + 1)
        window.destroy = lambda: setattr(window, "is_destroyed", True)
        self.windows.append(window)
        return window

    def Label(self, window: Any, borderwidth: int) -> Any:
        return SimpleNamespace(pack=lambda: None, configure=lambda image: self.pictures.append(image))


@pytest.fixture
def tk(monkeypatch: pytest.MonkeyPatch) -> FakeTk:
    fake = FakeTk()
    pictures = SimpleNamespace(PhotoImage=lambda picture, master: picture.copy())
    found = {"tkinter": fake, "PIL.ImageTk": pictures}
    monkeypatch.setattr("redline.stream.sinks.displays.import_module", lambda name: found[name])
    monkeypatch.setattr("redline.stream.sinks.displays.find_spec", lambda name: object())
    return fake


def test_a_window_shows_every_frame_and_is_closed(tk: FakeTk) -> None:
    sink = WindowSink()
    for frame in FRAMES:
        sink.write(frame)
    window = tk.windows[-1]
    assert window.updates == 3 and [picture.size for picture in tk.pictures] == [(8, 6)] * 3
    sink.close()
    assert all(one.is_destroyed for one in tk.windows)


def test_a_window_shows_pixels_as_wide_as_they_are(tk: FakeTk) -> None:
    sink = WindowSink()
    for aspect in (Fraction(3, 2), Fraction(1, 2), Fraction(1), Fraction(9)):
        sink.write(replace(FRAMES[0], pixel_aspect=aspect))
    assert [picture.size for picture in tk.pictures] == [(12, 6), (8, 12), (8, 6), (8, 6)], "nobody has pixels of 9:1"
    sink.close()


def test_closing_the_window_ends_the_stream(tk: FakeTk) -> None:
    ended = []
    sink = WindowSink()
    sink.on_closed = lambda: ended.append(True)
    sink.write(FRAMES[0])
    tk.windows[-1].closing()
    sink.write(FRAMES[1])
    assert ended == [True] and len(tk.pictures) == 1
    sink.abandon()


@pytest.mark.timeout(HANGS_S)
def test_a_window_can_be_closed_while_nothing_comes(tk: FakeTk) -> None:
    """Without frames, the window must still handle events."""
    sink, source = WindowSink(), ScriptedSource([(6, 8)], live=True)
    stopped = threading.Event()
    source.at_end = lambda: stopped.wait(PATIENCE_S)
    pipeline = Pipeline(source, Identity(), sink)
    sink.on_closed = lambda: (pipeline.stop(), stopped.set())

    def update(window: Any) -> None:
        window.updates += 1
        if window.updates == 3:  # the first is the frame's
            window.closing()

    make = tk.Tk

    def made() -> Any:
        window = make()
        window.update = lambda: update(window)
        return window

    tk.Tk = made
    outcome = pipeline.run()
    assert outcome.report.frames == 1 and not outcome.complete


def test_a_missing_screen_and_a_missing_library_are_reported(tk: FakeTk, monkeypatch: pytest.MonkeyPatch) -> None:
    tk.has_screen = False
    with pytest.raises(RedlineError, match=r"^cannot open a window \(no display.*\): use browser"):
        WindowSink()
    monkeypatch.setattr("redline.stream.sinks.displays.find_spec", lambda name: None)
    with pytest.raises(RedlineError, match=r"^window needs Python's tkinter"):
        WindowSink()


def test_a_virtual_camera_takes_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    library: Any = ModuleType("pyvirtualcam")

    class Camera:
        def __init__(self, **options: Any) -> None:
            sent.append(options)

        def send(self, pixels: Any) -> None:
            sent.append(pixels.shape)

        def close(self) -> None:
            sent.append("closed")

    library.Camera = Camera
    library.__spec__ = SimpleNamespace(name="pyvirtualcam")
    monkeypatch.setitem(sys.modules, "pyvirtualcam", library)
    sink = VirtualCameraSink(Fraction(25), "/dev/video9")
    for frame in FRAMES:
        sink.write(frame)
    sink.close()
    sink.abandon()
    assert sent[0] == {"width": 8, "height": 6, "fps": 25.0, "device": "/dev/video9"}
    assert sent[1:] == [(6, 8, 3)] * 3 + ["closed"]

    sent.clear()
    sink = VirtualCameraSink(Fraction(25))
    sink.write(replace(FRAMES[0], pixel_aspect=Fraction(3, 2)))
    sink.close()
    assert (sent[0]["width"], sent[0]["height"], sent[1]) == (12, 6, (6, 12, 3))

    def refuse(**_: Any) -> None:
        raise RuntimeError("virtual camera output could not be started\nmore")

    library.Camera = refuse
    with pytest.raises(RedlineError, match=r"^cannot open a virtual camera \(virtual camera output.*started\): on"):
        VirtualCameraSink(Fraction(25)).write(FRAMES[0])


def test_without_the_extra_a_virtual_camera_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.sinks.displays.find_spec", lambda name: None)
    with pytest.raises(RedlineError, match=r"pip install 'redline\[virtual-camera\]'\.$"):
        VirtualCameraSink(Fraction(25))
