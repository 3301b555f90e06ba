"""Minutes of everything going wrong: faults, changed settings, a slow sink, dead viewers; it goes on without a leak."""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from fractions import Fraction
from urllib.parse import urlsplit

import pytest
from torch import Tensor

from redline.plan import Plan
from redline.resident import resident_bytes
from redline.stream.engine import CUT_THRESHOLD, Engine
from redline.stream.frames import Frame
from redline.stream.latency import Latency
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Pipeline
from redline.stream.reader import Backoff
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks.mjpeg import MjpegSink
from redline.stream.sources import SourceFault
from redline.stream.sources.paced import Paced
from redline.stream.sources.synthetic import SyntheticClip
from stream.small_models import small_lsd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LASTS_S = float(os.environ.get("REDLINE_SOAK_S", "90"))


class Unsteady:
    """A camera that is lost now and then, and comes back with another size."""

    name, rate, is_live = "unsteady", Fraction(100), True
    height, width = 24, 32

    def __init__(self) -> None:
        self._inner: Paced | None = None
        self.connections = 0

    def frames(self) -> Generator[Frame, None, None]:
        self.connections += 1
        height, width = [(24, 32), (17, 21), (32, 24)][self.connections % 3]
        self._inner = Paced(SyntheticClip(height, width, count=None, rate=self.rate, seed=self.connections))
        for frame in self._inner.frames():
            yield frame
            if frame.index > 150:
                raise SourceFault("the camera is gone.")

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


class Slow(MjpegSink):
    """Stumbles now and then."""

    def write(self, frame: Frame) -> None:
        if random.random() < 0.02:
            time.sleep(0.05)
        super().write(frame)


def viewers(url: str, stop: threading.Event) -> None:
    """They come, look a little or not at all, and go without a word."""
    parts = urlsplit(url)
    while not stop.wait(0.05):
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as viewer:
            viewer.sendall(f"GET /stream.mjpeg HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
            if random.random() < 0.5:
                viewer.recv(2000)
            stop.wait(random.random() / 2)


def changes(settings: LiveSettings, stop: threading.Event) -> None:
    while not stop.wait(0.03):
        settings.change(strength=random.random(), seed=random.randrange(9), steps=random.randint(1, 4))
        settings.change(control=tuple(random.random() for _ in range(random.randint(0, 8))))


def test_a_soak() -> None:
    full = Settings(strength=1.0, steps=2)
    engine = Engine(LsdFrames(small_lsd(), Plan.parse("channels_last"), "cpu"), full, cut_threshold=CUT_THRESHOLD)
    settings, latency, stop = LiveSettings(full, engine.check), Latency(), threading.Event()
    source, sink = Unsteady(), Slow(port=0)
    pipeline = Pipeline(
        source, engine, sink, settings=settings, latency=latency, backoff=Backoff(first_s=0.05, longest_s=0.1)
    )
    others = [
        threading.Thread(target=viewers, args=(sink.url, stop)),
        threading.Thread(target=viewers, args=(sink.url, stop)),
        threading.Thread(target=changes, args=(settings, stop)),
    ]
    seen: list[tuple[int, int, int]] = []

    def measure() -> None:
        for _ in range(8):
            if stop.wait(LASTS_S / 8):
                break
            gc.collect()
            tensors = sum(type(thing) is Tensor for thing in gc.get_objects())
            seen.append((resident_bytes(), tensors, threading.active_count()))
        stop.set()
        pipeline.stop()

    others.append(threading.Thread(target=measure))
    for thread in others:
        thread.start()
    try:
        outcome = pipeline.run()
    finally:
        stop.set()
        for thread in others:
            thread.join()
    assert outcome.faults >= 3 and source.connections == outcome.faults + 1
    assert outcome.report.frames > 10 * LASTS_S and outcome.report.latency.p99_s < 2
    settled = seen[1:]
    most = max(resident for resident, _, _ in settled) - settled[0][0]
    assert most < 64 * 2**20, f"{most:,} bytes more: {seen}"
    assert max(tensors for _, tensors, _ in settled) < settled[0][1] + 100, seen
    assert max(threads for _, _, threads in settled) < 40, seen
    assert replace(settings.now()).steps in range(1, 5)
