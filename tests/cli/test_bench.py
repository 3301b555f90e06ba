"""`redline bench`: a saved run compares as the same, a planted slow-down is found, other machines are refused."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.ladder.bench import BenchRun
from redline.ladder.measuring.trial import Arm, TrialSpec, take_turns
from redline.ladder.search.preparation import ask_machine

from .conftest import TINY, Seen

# Long sleeps, so that the machine's other work is a small share of them.
WORKLOAD = [f"{TINY}:sleeper", "--device", "cpu", "--shapes", "milliseconds=20", "--sampling", "1s"]


@pytest.fixture
def without_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison does not ask for them, and each run would look at them again; the other tests have them."""
    monkeypatch.setattr(
        "redline.ladder.bench.ask_machine", lambda pool, device, **_: ask_machine(pool, device, measure=False)
    )


@pytest.fixture
def saved(without_ceilings: None, command: Callable[..., Seen], tmp_path: Path) -> Path:
    path = tmp_path / "then.json"
    seen = command("bench", *WORKLOAD, "--save", path)
    assert seen.code == 0, seen.err
    assert "sleeper milliseconds=20" in seen.out and f"saved {path}" in seen.err.replace("\n", "")
    return path


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    for row in document["measurements"]:
        edit(row)
    path.write_text(json.dumps(document))


def steady(seconds: float) -> Callable[[dict[str, Any]], None]:
    """An earlier run without noise: a neighbour's work can then only move the run that is compared, one way."""

    def edit(row: dict[str, Any]) -> None:
        row["samples"] = {shape: [seconds] * len(samples) for shape, samples in row["samples"].items()}

    return edit


def verdict(seen: Seen) -> str:
    (only,) = seen.json()["changes"]
    return only["verdict"]


@pytest.mark.alone
@pytest.mark.usefixtures("without_compiler")
def test_compare(saved: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    arguments = ["bench", *WORKLOAD, "--compare", saved]
    # A neighbour that comes or goes between two runs makes a true difference; not three times in a row.
    for _ in range(3):
        same = command(*arguments, "--json", "--save", saved)
        if verdict(same) == "same":
            break
    assert (same.code, verdict(same)) == (0, "same")
    # The earlier run was 20% faster than the sleep: this one is a regression.
    change(saved, steady(0.016))
    slower = command(*arguments)
    assert slower.code == 1 and slower.out.rstrip().endswith("slower")
    change(saved, steady(0.060))
    faster = command(*arguments, "--json")
    assert (faster.code, verdict(faster)) == (0, "faster")


def test_what_is_not_compared(saved: Path, command: Callable[..., Seen], tmp_path: Path) -> None:
    arguments = ["bench", *WORKLOAD, "--sampling", "300ms", "--compare", saved]
    # Slower than any run, so that a neighbour on the machine causes no regression.
    change(saved, steady(1.0))
    change(saved, lambda row: row["machine"].update(fingerprint="another", name="Another machine"))
    refused = command(*arguments, "--save", tmp_path / "now.json")
    assert refused.code == 2 and refused.out == ""
    assert "different machines" in refused.err and "Another machine" in refused.err
    # What was measured is kept all the same.
    assert len(json.loads((tmp_path / "now.json").read_text())["measurements"]) == 1
    assert command(*arguments, "--any-machine").code == 0

    change(saved, lambda row: row.update(plan="bf16"))
    missing = command(*arguments, "--any-machine", "--json")
    assert (missing.code, verdict(missing)) == (1, "missing")


def test_plans_side_by_side(command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('schema = 1\n[[rung]]\nname = "fold_batchnorm"\n')
    arguments = [f"{TINY}:convolutions", "--device", "cpu", "--sampling", "300ms"]
    seen = command("bench", *arguments, "--plan", "eager", "--plan", "plan.toml", "--plan", "tf32", "--json")
    rows = seen.json()["measurements"]
    assert {row["plan"]: row["verdict"] for row in rows} == {
        "eager": "baseline",
        "fold_batchnorm": "baseline",
        "tf32": "unavailable",
    }
    timed = [row for row in rows if row["samples"]]
    assert len({len(row["samples"][""]) for row in timed}) == 1
    # A plan that was asked for and cannot run here is a failure, said once.
    assert seen.code == 1 and "convolutions under tf32 was unavailable: tf32: " in seen.err


def test_a_plan_outside_its_gate_fails_and_is_saved_as_strict_json(
    command: Callable[..., Seen], tmp_path: Path
) -> None:
    arguments = [f"{TINY}:strict", "--device", "cpu", "--sampling", "300ms"]
    seen = command("bench", *arguments, "--plan", "autocast(dtype=bf16)", "--save", "run.json", "--json")
    (row,) = seen.json()["measurements"]
    assert row["verdict"] in ("refused", "unavailable") and seen.code == 1
    json.loads((tmp_path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_the_matrix_has_a_row_per_precision(command: Callable[..., Seen]) -> None:
    workloads = [f"{TINY}:perceptron", f"{TINY}:strict"]
    seen = command("bench", *workloads, "--matrix", "--device", "cpu", "--sampling", "300ms")
    assert seen.code == 0, seen.err
    header, *rows = seen.out.splitlines()
    assert header.split()[:3] == ["workload", "plan", "median"]
    for precision in ("eager", "tf32", "autocast", "bf16", "fp16"):
        assert sum(f" {precision} " in row for row in rows) >= 2, precision


def test_a_matrix_takes_no_plans(command: Callable[..., Seen]) -> None:
    seen = command("bench", "resnet", "--matrix", "--plan", "bf16")
    assert seen.code == 2 and "--matrix has its own plans" in seen.err


def test_a_plan_that_dies_while_it_is_timed_is_a_row(
    command: Callable[..., Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[str] = []

    def take(arms: list[Arm], spec: TrialSpec) -> object:
        if not died:
            died.append(str(arms[1].plan))
            os.kill(arms[1].worker.pid, signal.SIGKILL)
        return take_turns(arms, spec)

    monkeypatch.setattr("redline.ladder.bench.take_turns", take)
    saved = tmp_path / "saved.json"
    plans = ["--plan", "eager", "--plan", "fold_batchnorm"]
    seen = command("bench", f"{TINY}:convolutions", *plans, "--device", "cpu", "--sampling", "300ms", "--save", saved)
    assert seen.code == 1 and died == ["fold_batchnorm"]
    rows = {row.plan: row for row in BenchRun.load(saved).measurements}
    assert (
        rows["eager"].samples
        and rows["fold_batchnorm"].verdict == "failed"
        and "SIGKILL" in rows["fold_batchnorm"].reason
    )
