"""`redline.doctor`: its example runs."""

import contextlib
import doctest

import pytest

import redline
import redline.ladder.doctor as module
from redline.ladder.measuring.worker_pool import WorkerPool


def test_docstring_examples(monkeypatch: pytest.MonkeyPatch, lent_pool: WorkerPool) -> None:
    monkeypatch.setattr(module, "WorkerPool", lambda: contextlib.nullcontext(lent_pool))
    results = doctest.testmod(module, extraglobs={"redline": redline})
    assert results.attempted and not results.failed
