"""What tests share."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.workers import WorkerPool

ONEDNN = torch._C._get_mkldnn_enabled()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A background job of a shell ignores Ctrl-C, and so would every child; some tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ceilings and compiled code go into a folder of the tests' own, never the user's or another process's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_CACHE", str(folder))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield folder


@pytest.fixture(autouse=True)
def onednn_kept() -> Iterator[None]:
    """A CPU without bf16 turns oneDNN off at the first bf16 product: the tests that follow must not see that."""
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.enabled = ONEDNN  # a fixture for a whole file may have turned it off
    yield
    mkldnn.enabled = ONEDNN


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A climb in which torch.compile does nothing, and is refused at once: for tests that look at something else."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def quiet_pool() -> Iterator[WorkerPool]:
    """Workers of a climb without torch.compile, which have to be born without it."""
    with WorkerPool({"TORCH_COMPILE_DISABLE": "1"}) as pool:
        yield pool


@pytest.fixture
def lent_pool(request: pytest.FixtureRequest) -> WorkerPool:
    """The session's workers, with or without torch.compile; to start a pool for each climb would cost seconds."""
    return request.getfixturevalue("quiet_pool" if "without_compiler" in request.fixturenames else "pool")
