"""What the benchmarks of operators race, and that one arm which cannot be captured leaves the others alone."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_scripts import load_script

arms = load_script("kernels/arms")


def test_slow_arms_run_on_request_and_any_can_be_left_out() -> None:
    three = dict.fromkeys(("eager", "compiled", "ours"), lambda: lambda: ())
    case = arms.Case("op", {}, three, expected=lambda: (), largest_error=0.0, on_request=("compiled",))
    assert list(arms.with_arms(case, [], []).arms) == ["eager", "ours"]
    assert list(arms.with_arms(case, [], ["compiled"]).arms) == ["eager", "compiled", "ours"]
    assert list(arms.with_arms(case, ["eager", "unknown"], ["compiled"]).arms) == ["compiled", "ours"]
    assert list(arms.with_arms(case, ["compiled"], ["compiled"]).arms) == ["eager", "ours"]


def test_graphs_share_a_pool_until_a_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class GraphCapturer:
        def __init__(self, _device: object) -> None:
            self.runs = 0
            made.append(self)

        def warm_up(self, run: Callable[[], object]) -> object:
            return run()

        def capture(self, run: Callable[[], object]) -> tuple[object, Callable[[], None]]:
            self.runs += 1
            return run(), lambda: None

    monkeypatch.setattr(arms, "CudaGraphCapturer", GraphCapturer)
    monkeypatch.setattr(arms.torch.cuda, "current_device", lambda: 0)
    graphs = arms.Graphs()

    def fails() -> tuple[()]:
        if made[-1].runs == 3:
            raise RuntimeError("not while capturing")
        return ()

    graphs.captured(tuple)
    graphs.captured(tuple)
    with pytest.raises(RuntimeError, match="not while capturing"):
        graphs.captured(fails)
    graphs.captured(tuple)
    assert [recorder.runs for recorder in made] == [3, 1]


def test_an_arm_that_fails_in_the_race_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory() -> None:
        raise MemoryError("no room")

    def race(runs: dict[str, Callable[[], object]], *_: object) -> dict[str, list[float]]:
        for name, run in runs.items():
            try:
                run()
            except MemoryError as failure:
                raise arms.ArmFailed(name, failure) from failure
        return {name: [1.0] for name in runs}

    monkeypatch.setattr(arms, "race", race)
    monkeypatch.setattr(arms, "free", lambda: None)
    rows: dict[str, dict[str, object]] = {"large": {}, "small": {}}
    runs = {"large": out_of_memory, "small": lambda: None}
    assert arms.race_and_drop_failures(runs, 1, lambda: None, rows) == {"small": [1.0]}
    assert rows == {"large": {"failure": "beside the others: MemoryError: no room"}, "small": {}}


def test_shares_compile_every_arm_once_and_go_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms.torch.cuda, "synchronize", lambda: None)
    ran: list[int] = []

    def build(number: int):
        def run() -> tuple:
            ran.append(number)
            if number == 1:
                raise RuntimeError("out of resource")
            return ()

        return lambda: run

    case = arms.Case("op", {}, {str(n): build(n) for n in range(7)}, expected=lambda: (), largest_error=0.0)
    for index in range(3):
        arms.run_share(case, index, 3)
    assert sorted(ran) == list(range(7))


def test_a_run_that_is_killed_leaves_what_it_had_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first case is timed, the second is killed before its last arm; what began too late is a row as well."""
    out = tmp_path / "rows.jsonl"
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(arms.torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(arms.torch.cuda, name, lambda: 0)
    monkeypatch.setattr(arms.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arms.torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(arms, "copy_rate", lambda: 1.0)
    monkeypatch.setattr(arms, "race", lambda runs, rounds, restore: {name: [1.0, 2.0] for name in runs})
    monkeypatch.setattr(sys, "argv", ["op.py", "--out", str(out)])

    def one() -> tuple[torch.Tensor, ...]:
        return (torch.ones(1),)

    def killed() -> Any:
        raise KeyboardInterrupt

    def cases() -> Any:
        names = ("eager", "ours")
        last: dict[str, Any] = {"eager": lambda: one, "ours": killed}
        for case_arms in (dict.fromkeys(names, lambda: one), last):
            yield arms.Case("op", {}, case_arms, expected=one, largest_error=0.0, asks_the_host=names)

    with pytest.raises(KeyboardInterrupt):
        arms.main("op", cases)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["arm"], row.get("median_ms")) for row in found] == [("eager", 1.5), ("ours", 1.5), ("eager", None)]
    assert found[2]["failure"] == arms.CUT_OFF
    monkeypatch.setattr(sys, "argv", ["op.py", "--out", str(out), "--limit-s", "0"])
    assert arms.main("op", cases) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) == 4 and all("--limit-s" in row["failure"] for row in found)
