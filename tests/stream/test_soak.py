"""A soak test with faults, changed settings, a slow sink, and dead viewers and browsers: the stream continues and leaks
nothing."""

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from torch import Tensor

from redline.ladder.plan import Plan
from redline.machine.host_memory import resident_bytes
from redline.stream.browser import Page, serve
from redline.stream.engine import CUT_THRESHOLD, Engine
from redline.stream.frames import Frame
from redline.stream.latency import Latency
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Backoff, Pipeline
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks.mjpeg import MjpegSink
from redline.stream.sources import SourceFault
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.wrappers import Paced
from stream.small_models import small_lsd

LASTS_S = float(os.environ.get("REDLINE_SOAK_S", "90"))
# Viewers are given up 10 s after there was no more room for what they do not read, and browsers that are silent after
# one and a half heart-beats of 5 s.
SILENT_S, FROZEN_S = 30.0, 15.0
SEED = int(os.environ.get("REDLINE_SOAK_SEED", "0"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("aiortc") is None, reason="a page needs the extra `browser`"),
]

# A page without a browser, in a process that can be stopped or killed in the middle of a picture.
VIEWER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from stream.browser.clients import open_page, picture_of

async def main():
    async with open_page(sys.argv[1]) as page:
        tracks = await page.offer(["output"])
        while True:
            await picture_of(tracks["output"])
            print("seen", flush=True)

asyncio.run(main())
"""


class Unsteady:
    """A camera that disconnects from time to time and comes back with another size."""

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


class Shown:
    """Writes to both outputs, one of which is slow from time to time."""

    name, takes_new_size = "shown", True

    def __init__(self, mjpeg: MjpegSink, page: Page) -> None:
        assert page.sink is not None
        self._sinks, self._chance = (mjpeg, page.sink), random.Random(SEED)

    def write(self, frame: Frame) -> None:
        if self._chance.random() < 0.02:
            time.sleep(0.05)
        for sink in self._sinks:
            sink.write(frame)

    def close(self, complete: bool = True) -> None:
        for sink in self._sinks:
            sink.close(complete)

    def abandon(self) -> None:
        self.close(False)


def asked(url: str) -> bytes:
    return f"GET /stream.mjpeg HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n".encode()


def fleeting(url: str, stop: threading.Event, seed: int) -> None:
    """Viewers that connect, read a little or nothing, and disconnect."""
    parts, chance = urlsplit(url), random.Random(seed)
    while not stop.wait(0.05):
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as viewer:
            viewer.sendall(asked(url))
            if chance.random() < 0.5:
                viewer.recv(2000)
            stop.wait(chance.random() / 2)


def silent(url: str, given_up: list[bool]) -> None:
    """A viewer that reads nothing; records whether it was disconnected."""
    parts = urlsplit(url)
    with socket.socket() as viewer:
        # Little room on the way, so that the other end soon has nowhere to write.
        viewer.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        viewer.connect((parts.hostname, parts.port))
        viewer.sendall(asked(url))
        time.sleep(SILENT_S)
        viewer.settimeout(5)
        ends_s = time.monotonic() + 5
        with suppress(ConnectionResetError):
            while viewer.recv(65536):
                if time.monotonic() > ends_s:
                    given_up.append(False)
                    return
        given_up.append(True)


def dead_browsers(page: Page, left: list[int]) -> None:
    """Kills one viewer and freezes another, then records how many sessions remain."""
    tests = str(Path(__file__).parents[1])
    viewers = [
        subprocess.Popen([sys.executable, "-c", VIEWER, page.url, tests], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for viewer, how in zip(viewers, (signal.SIGKILL, signal.SIGSTOP), strict=True):
            assert viewer.stdout is not None and viewer.stdout.readline() == b"seen\n"
            viewer.send_signal(how)
        assert page._server._sessions
        time.sleep(FROZEN_S)
        left.append(len(page._server._sessions))
    finally:
        for viewer in viewers:
            viewer.kill()
            viewer.communicate()


def changes(settings: LiveSettings, stop: threading.Event) -> None:
    chance = random.Random(SEED)
    while not stop.wait(0.03):
        settings.change(strength=chance.random(), seed=chance.randrange(9), steps=chance.randint(1, 4))
        settings.change(control=tuple(chance.random() for _ in range(chance.randint(0, 8))))


def descriptors() -> list[str]:
    """Returns the targets of open file descriptors."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def test_a_soak() -> None:
    full = Settings(strength=1.0, steps=2)
    engine = Engine(LsdFrames(small_lsd(), Plan.parse("channels_last"), "cpu"), full, cut_threshold=CUT_THRESHOLD)
    # Libraries open some things once, for good.
    engine.prepare(Unsteady.height, Unsteady.width)
    before, threads_before = descriptors(), threading.active_count()
    settings, latency, stop = LiveSettings(full, engine.model.check), Latency(), threading.Event()
    source, mjpeg = Unsteady(), MjpegSink(port=0)
    page = serve(port=0, as_source=False, as_sink=True, settings=settings, latency=latency)
    pipeline = Pipeline(
        source,
        engine,
        Shown(mjpeg, page),
        settings=settings,
        latency=latency,
        backoff=Backoff(first_s=0.05, longest_s=0.1),
    )
    seen: list[tuple[int, int, int]] = []
    given_up: list[bool] = []
    left: list[int] = []

    def measure() -> None:
        for _ in range(8):
            stop.wait(LASTS_S / 8)
            gc.collect()
            tensors = sum(type(thing) is Tensor for thing in gc.get_objects())
            seen.append((resident_bytes(), tensors, threading.active_count()))
        for thread in others[:2]:
            thread.join()
        stop.set()
        pipeline.stop()

    others = [
        threading.Thread(target=silent, args=(mjpeg.url, given_up)),
        threading.Thread(target=dead_browsers, args=(page, left)),
        *(threading.Thread(target=fleeting, args=(mjpeg.url, stop, seed)) for seed in (SEED, SEED + 1)),
        threading.Thread(target=changes, args=(settings, stop)),
        threading.Thread(target=measure),
    ]
    for thread in others:
        thread.start()
    try:
        outcome = pipeline.run()
    finally:
        stop.set()
        for thread in others:
            thread.join()
        page.close()
    # It is stopped while it gives frames, or while it is waited for.
    assert outcome.faults >= 3 and source.connections - outcome.faults in (0, 1)
    assert outcome.report.frames > 10 * LASTS_S and outcome.report.latency.p99_s < 2
    assert given_up == [True], "a viewer that reads nothing is still served"
    assert left == [0], "browsers that are dead are still held"
    settled = seen[1:]
    most = max(resident for resident, _, _ in settled) - settled[0][0]
    assert most < 64 * 2**20, f"{most:,} bytes more: {seen}"
    assert max(tensors for _, tensors, _ in settled) < settled[0][1] + 100, seen
    assert max(threads for _, _, threads in settled) < 40, seen
    left_open = [name for name in descriptors() if name not in before]
    assert left_open == [] and threading.active_count() <= threads_before
