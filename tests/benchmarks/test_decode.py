"""benchmarks/decode.py as a toy: arms are timed turn by turn, and a run that is killed leaves what it had measured."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    return load_script("decode")


def rows(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> list[dict[str, Any]]:
    command = ["decode.py", "--tiny", "--rounds", "2", "--prompt", "8", "--tokens", "4", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", command)
    assert decode.main() == 0
    return read(out)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def arm(decode: ModuleType, wrong_at: int = -1) -> Callable[[], Any]:
    """Of a second a token; its run number `wrong_at` is the user's Ctrl-C. The first makes it ready."""
    ran: list[None] = []

    def run() -> tuple[float, float]:
        ran.append(None)
        if len(ran) == wrong_at:
            raise KeyboardInterrupt
        return 0.5, 3.0

    return lambda: decode.Arm(run, lambda: torch.ones(1, 2))


def test_arms_of_both_kinds_are_timed(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = rows(decode, monkeypatch, tmp_path / "rows.jsonl", "--only", "eager", "--batch", "1", "--batch", "2")
    assert [(row["arm"], row["batch"]) for row in found] == [("redline eager", 1), ("redline eager", 2)]
    assert all(row["ms_per_token"] > 0 and len(row["ms_per_token_samples"]) == 2 for row in found)


def test_no_arm_is_set_up_after_the_limit(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = rows(decode, monkeypatch, tmp_path / "rows.jsonl", "--only", "graph", "--limit-s", "0")
    assert len(found) > 5 and all("--limit-s" in row["failure"] for row in found)


def test_what_is_ready_at_the_limit_is_still_timed(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = [False]

    def last() -> Any:
        late[0] = True
        return arm(decode)()

    chosen = {"one": arm(decode), "two": last, "three": arm(decode)}
    monkeypatch.setattr(decode, "arms", lambda _: chosen)
    monkeypatch.setattr(decode, "ours", lambda *_, **__: arm(decode)())
    monkeypatch.setattr(decode.time, "perf_counter", lambda: 1000.0 if late[0] else 0.0)
    found = rows(decode, monkeypatch, tmp_path / "rows.jsonl", "--limit-s", "10")
    assert [row.get("ms_per_token") for row in found] == [1000.0, 1000.0, None]
    assert "--limit-s" in found[2]["failure"]


def test_a_run_that_is_killed_leaves_what_it_had_measured(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(decode, "ours", lambda *_, **__: arm(decode)())
    for wrong_at, timed in ((1, 0), (2, 0), (3, 1)):
        monkeypatch.setattr(
            decode, "arms", lambda _, wrong_at=wrong_at: {"one": arm(decode), "two": arm(decode, wrong_at)}
        )
        with pytest.raises(KeyboardInterrupt):
            rows(decode, monkeypatch, out)
        found = read(out)
        assert [row["arm"] for row in found] == (["one"] if wrong_at == 1 else ["one", "two"])
        assert all(len(row.get("ms_per_token_samples", ())) == timed for row in found)
        assert all("cut off" in row.get("failure", "") for row in found) == (not timed)
