"""The command line called as the installed script calls it, with the session's workers behind it."""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import redline.cli
from redline.ladder.measuring.worker_pool import WorkerPool

TINY = Path(__file__).parents[1] / "tiny_workloads.py"


def strict_json(text: str) -> Any:
    """As a strict reader takes it: one document, no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Seen:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return strict_json(self.out)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, lent_pool: WorkerPool
) -> Callable[..., Seen]:
    """`command("climb", "resnet")` in an empty folder; starting a pool of its own would cost each call seconds."""
    for module in (
        "redline.ladder.search.climb",
        "redline.ladder.verify",
        "redline.ladder.bench",
        "redline.ladder.doctor",
    ):
        monkeypatch.setattr(import_module(module), "WorkerPool", lambda: contextlib.nullcontext(lent_pool))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Seen:
        monkeypatch.setattr(sys, "argv", ["redline", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            redline.cli.main()
        seen = capfd.readouterr()
        code = end.value.code
        return Seen(0 if code is None else int(code), seen.out, seen.err)

    return run
