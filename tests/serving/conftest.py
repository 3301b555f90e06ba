"""A server with the fake engine, in a thread of the tests; its engine is a process."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from redline.serving.keys import Keys
from redline.serving.limits import Limits
from redline.serving.server import EngineSource, Server
from serving.fake_engine import write_folder

FACTORY = "serving.fake_engine:load"
MakeServer = Callable[..., Server]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


def make_server(folder: Path, keys: dict[str, str] | None = None, silence_s: float = 60.0, **values: Any) -> Server:
    """Returns a server that is not started; `values` are options of the engine and limits."""
    options = {name: values.pop(name) for name in ("step_s", "error") if name in values}
    engine = EngineSource(FACTORY, {"folder": str(folder), **options}, silence_s)
    return Server(folder, engine, port=0, keys=Keys.of(keys or {}), limits=Limits(**values))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with make_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture
def no_errors_logged(logged: list[logging.LogRecord]) -> Iterator[None]:
    """Fails if the server logged an error."""
    yield
    assert [record.getMessage() for record in logged if record.levelno >= logging.ERROR] == []
