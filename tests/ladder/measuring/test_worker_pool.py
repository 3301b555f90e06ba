"""A worker that crashes, hangs or runs out of memory raises WorkerFailed with the reason, and leaves no files."""

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import cloudpickle
import pytest
import torch

from redline.errors import RedlineError
from redline.ladder.measuring.trial import TrialSpec, open_arm
from redline.ladder.measuring.worker_pool import WorkerFailed, WorkerPool
from redline.ladder.plan import Plan

WORKLOADS = str(Path(__file__).parents[2] / "tiny_workloads.py")


def reference(pool: WorkerPool, function: str, **options: object) -> str:
    path = str(pool.scratch / "reference.pt")
    worker = pool.start()
    try:
        worker.ask(
            "reference",
            60,
            address=f"{WORKLOADS}:{function}",
            shapes={"": options},
            device="cpu",
            paths={(10, 11, 12): path},
            dtype="fp32",
        )
    finally:
        worker.stop()
    return path


def test_how_workers_end(pool: WorkerPool, tmp_path: Path) -> None:
    """How a pool ends its workers and deletes its files is tested in `cli/test_signals`."""
    torch.save({}, tmp_path / "empty.pt")
    references = {(10, 11, 12): str(tmp_path / "empty.pt")}
    for how, kind, words in (
        ("crash", "crash", "SIGSEGV"),
        ("oom", "oom", "out of memory"),
        ("hang", "timeout", "no result within 2 s"),
    ):
        spec = TrialSpec(f"{WORKLOADS}:dies", {"": {"how": how}}, "cpu", references, timeout_s=2)
        with pytest.raises(WorkerFailed, match=words) as failure:
            open_arm(pool, spec, Plan())
        assert failure.value.kind == kind and not os.path.exists(f"/proc/{failure.value.pid}")
    good = pool.start()
    assert good.ask("machine", 60, device="cpu", measure=False)["device"] == "cpu"
    good.stop()


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("deaf", "does not react to the input"),
        ("deaf_training", "does not react to the input"),
        ("nan", "NaN or infinity"),
        ("raises", "this model is broken"),
        ("wrong_device", "tensor on meta while the model runs on cpu"),
        ("build_raises", "build\\(\\) raised RuntimeError: no weights here"),
        ("nothing", "returned NoneType"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_workload_that_cannot_be_judged_is_refused(function: str, sentence: str, pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=sentence):
        reference(pool, function)


@pytest.mark.alone
def test_forked_workers_start_fast(quiet_pool: WorkerPool) -> None:
    start = time.perf_counter()
    for _ in range(3):
        worker = quiet_pool.start()
        worker.ask("machine", 60, device="cpu", measure=False)
        worker.stop()
    assert (time.perf_counter() - start) / 3 < 2.0


def has_imported(names: Sequence[str]) -> list[bool]:
    return [name in sys.modules for name in names]


def test_modules_are_imported_early_in_all_further_workers(lent_pool: WorkerPool) -> None:
    question = functools.partial(has_imported, ["tabnanny", "sched"])
    answers = []
    for modules in ([], ["no_such_module", "tabnanny"]):
        lent_pool.import_early(modules)
        answers.append(lent_pool.start().ask("call", 60, function=cloudpickle.dumps(question), path=sys.path))
    assert answers == [[False, False], [True, False]]


def test_an_interrupted_request_does_not_disturb_the_next(
    lent_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may arrive between a request to the fork server and its answer."""
    worker = lent_pool.start()
    with monkeypatch.context() as patch:
        patch.setattr(lent_pool, "_reader", Interrupted())
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                lent_pool.exit_code(worker.pid)
    assert lent_pool.exit_code(worker.pid) is None
    assert lent_pool.start().ask("machine", 60, device="cpu", measure=False)["device"] == "cpu"


class Interrupted:
    def readline(self) -> bytes:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("log", "reason"), [("first\nlast\n", "last"), ("", "no message; was it killed")])
def test_a_fork_server_that_ended_is_one_sentence(log: str, reason: str, tmp_path: Path) -> None:
    pool, (ours, theirs) = WorkerPool(), socket.socketpair()
    pool.scratch, pool._control, pool._reader = tmp_path, ours, ours.makefile("rb")
    (tmp_path / "fork-server.log").write_text(log)
    threading.Timer(0.01, theirs.close).start()  # the server ends before it answers, and then it is gone
    with ours, pool._reader:
        for _ in range(2):
            with pytest.raises(RedlineError, match=f"^the fork server, which starts .*, has ended: {reason}"):
                pool.start()
