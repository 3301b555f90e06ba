"""What tests share."""

import contextlib
import functools
import gc
import logging
import os
import pickle
import platform
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from filelock import FileLock

from forked_python import ForkedPython
from patience import PATIENCE_S
from redline.ladder.measuring.worker_pool import Worker, WorkerPool
from redline.machine.compiler_files import prepare_compiler
from redline.machine.machine import Machine

ONEDNN = torch._C._get_mkldnn_enabled()


def pytest_configure() -> None:
    """Processes that test side by side share the cores, or each would take all of them."""
    if platform.machine() == "x86_64":
        # torch.compile asks the CPU which vector instructions it has, and then builds and loads a program for each set,
        # which takes 10 s of CPU time once and 1 s in every process: it may skip these programs.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        share = max(1, (os.cpu_count() or 1) // processes)
        torch.set_num_threads(share)
        # For the processes that tests start, which would each take all of them too.
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
        # Otherwise every process that compiles starts others that import torch.
        threads = 2 * share if torch.cuda.is_available() else 1
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))


# The files that take longest. Begun first, they do not keep one process busy while the others have nothing left.
LONG = (
    "ladder/search/test_climb.py",
    "ladder/search/test_climb_limits.py",
    "ladder/test_optimize.py",
    "evaluation/recall/test_learning_needles.py",
    "evaluation/recall/test_learning_pairs.py",
    "cli/test_climb.py",
    "ops/test_contract.py",
    "ladder/workloads/test_workloads.py",
    "docs/test_snippets.py",
    "upscale/workers/test_shared_run.py",
    "stream/sources/test_frame_threaded.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(str(item.path), len(LONG)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords, which also hold the names of folders
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage has to walk through it again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A background job of a shell ignores Ctrl-C, and so would every child; some tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Ceilings and compiled code go into a folder of the tests' own, never the user's; code not another process's."""
    folder = tmp_path_factory.mktemp("cache")
    # What is known of the machine is the same for all who test side by side, and takes seconds to find out.
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDLINE_CACHE", str(shared / "machine"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        if "PYTEST_XDIST_WORKER" in os.environ and not torch.cuda.is_available():
            with FileLock(shared / "compiler.lock"):  # one builds the compiler's files, and the others copy them
                prepare_compiler(Machine.detect("cpu"), folder / "inductor", Path(tempfile.gettempdir()))
        yield os.environ["REDLINE_CACHE"]


@pytest.fixture(scope="module", autouse=True)
def objects_so_far_stay() -> None:
    """No collection of garbage has to walk through what earlier tests have imported."""
    gc.freeze()


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """The records that reach the root logger. pytest's own plugin for this takes 2 ms of every test."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.fixture(autouse=True)
def onednn_kept() -> Iterator[None]:
    """A CPU without bf16 turns oneDNN off at the first bf16 product: the tests that follow must not see that."""
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.enabled = ONEDNN  # a fixture for a whole file may have turned it off
    yield
    mkldnn.enabled = ONEDNN


@pytest.fixture(autouse=True)
def may_wait_again() -> Iterator[None]:
    """Whatever a test did, the next one may wait for the device."""
    yield
    if torch.cuda.is_initialized():
        _on_waiting("default")


@pytest.fixture
def waits_for_nobody() -> Callable[[], AbstractContextManager[None]]:
    """`with waits_for_nobody():` raises where the host waits for the GPU; what went before is waited for first."""

    @contextlib.contextmanager
    def check() -> Iterator[None]:
        torch.cuda.synchronize()
        try:
            _on_waiting("error")
            yield
        finally:
            _on_waiting("default")

    return check


def _on_waiting(mode: str) -> None:
    with warnings.catch_warnings():
        # Said once a process, and after the mode was set: as an error it would leave the mode on.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture
def any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 and fp16 are taken on every CPU: how fast this one is in them is not what is asked."""
    detect = Machine.detect

    def listing(device: str = "auto") -> Machine:
        found = detect(device)
        return replace(found, hardware_dtypes=tuple({*found.hardware_dtypes, "bf16", "fp16"}))

    monkeypatch.setattr(Machine, "detect", listing)
    monkeypatch.setattr(Machine, "why_slow", lambda *_: "")


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A climb in which torch.compile does nothing, and is refused at once: for tests that look at something else."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")


@pytest.fixture(scope="session")
def quick_onnx_export() -> Iterator[None]:
    """Each export of torch would build the same registries of operators again, which takes a second."""
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops))
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="session")
def forked_python() -> Iterator[ForkedPython]:
    with ForkedPython() as forked:
        yield forked


@pytest.fixture(scope="session")
def pool(cache_of_its_own: str) -> Iterator[WorkerPool]:
    """Its cache is that of the session, also if the first test to use it has set another."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REDLINE_CACHE", cache_of_its_own)
            patch.delenv("TORCH_COMPILE_DISABLE", raising=False)
            pool = stack.enter_context(WorkerPool())
        yield pool


class QuietPool:
    """Starts workers of a pool in which torch.compile does nothing; a fork server of its own would take 4 CPU s."""

    # The fork server read the environment variable when it imported torch.
    _DISABLE = """
import os
import torch._dynamo
os.environ["TORCH_COMPILE_DISABLE"] = "1"
torch._dynamo.config.disable = True
"""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def start(self) -> Worker:
        worker = self._pool.start()
        worker.ask("call", PATIENCE_S, function=pickle.dumps(partial(exec, self._DISABLE, {})), path=[])
        return worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@pytest.fixture(scope="session")
def quiet_pool(pool: WorkerPool) -> WorkerPool:
    return cast(WorkerPool, QuietPool(pool))


@pytest.fixture
def lent_pool(request: pytest.FixtureRequest) -> WorkerPool:
    """The session's workers, with or without torch.compile; to start a pool for each climb would cost seconds."""
    return request.getfixturevalue("quiet_pool" if "without_compiler" in request.fixturenames else "pool")


@pytest.fixture
def folders_called_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be read, not even by root, for whom no mode of a folder is a bar."""
    scandir = os.scandir

    def locked(folder: Path) -> Any:
        if Path(folder).name == "locked":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", locked)
