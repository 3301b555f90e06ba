"""Serves pages during a test, with or without a stream."""

import logging
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
from torch import Tensor

from patience import PATIENCE_S
from redline.stream.browser import Page, serve
from redline.stream.frames import Frame
from redline.stream.latency import Latency
from redline.stream.pipeline import Backoff, Pipeline
from redline.stream.settings import LiveSettings
from stream.doubles import Identity

# Without the extra `browser` (on a machine for GPU tests, say) there is nothing to serve.
collect_ignore_glob = [] if find_spec("aiortc") and find_spec("aiohttp") else ["test_*.py"]


@pytest.fixture(autouse=True)
def nothing_is_swept_under_the_loop(logged: list[logging.LogRecord]) -> Iterator[None]:
    """Fails on errors that an event loop logged because no task awaited them."""
    yield
    assert [record.getMessage() for record in logged if record.levelno >= logging.ERROR] == []


class Inverted(Identity):
    def __call__(self, frame: Frame) -> Tensor:
        return 255 - frame.pixels


class Running:
    """A page with a pipeline that runs in its own thread."""

    def __init__(self, page: Page, pipeline: Pipeline, told: list[str]) -> None:
        self.page, self.pipeline, self.told = page, pipeline, told
        self.error: BaseException | None = None
        self.outcome = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.pipeline.run()
        except BaseException as error:
            self.error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.pipeline.stop()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def open_server() -> Iterator[Callable[..., Page]]:
    """Calls `serve` on a free port, and closes the page after the test."""
    pages: list[Page] = []

    def open_(**options: object) -> Page:
        given = {"port": 0, "as_source": True, "as_sink": True, "settings": LiveSettings(), "latency": Latency()}
        pages.append(serve(**(given | options)))
        return pages[-1]

    yield open_
    for page in pages:
        page.close()


@pytest.fixture
def run_stream(open_server: Callable[..., Page]) -> Iterator[Callable[..., Running]]:
    """Runs a stream; `source`, `sink` and `transform` replace those of the page."""
    streams: list[Running] = []

    def run(source=None, sink=None, transform=None, **options: object) -> Running:
        settings, latency, told = options.pop("settings", LiveSettings()), Latency(), []
        page = open_server(
            settings=settings, latency=latency, as_source=source is None, as_sink=sink is None, **options
        )
        pipeline = Pipeline(
            page.source if source is None else page.preview(source),
            transform or Inverted(),
            sink or page.sink,
            settings=settings,
            latency=latency,
            backoff=Backoff(0.05, 1, 0.05),
            log=told.append,
        )
        streams.append(Running(page, pipeline, told))
        return streams[-1]

    yield run
    for stream in streams:
        stream.stop()
        assert stream.error is None, stream.error
