"""What the benchmarks of operators race, and that one arm which cannot be captured leaves the others alone."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks/kernels/arms.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("redline_arms", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


arms = _load()


def test_slow_arms_run_on_request_and_any_can_be_left_out() -> None:
    three = dict.fromkeys(("eager", "compiled", "ours"), lambda: lambda: ())
    case = arms.Case("op", {}, three, expected=lambda: (), largest_error=0.0, on_request=("compiled",))
    assert list(arms.with_arms(case, [], []).arms) == ["eager", "ours"]
    assert list(arms.with_arms(case, [], ["compiled"]).arms) == ["eager", "compiled", "ours"]
    assert list(arms.with_arms(case, ["eager", "unknown"], ["compiled"]).arms) == ["compiled", "ours"]
    assert list(arms.with_arms(case, ["compiled"], ["compiled"]).arms) == ["eager", "ours"]


def test_graphs_share_a_pool_until_a_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Recorder:
        def __init__(self, _device: object) -> None:
            self.runs = 0
            made.append(self)

        def rehearse(self, run: Callable[[], object]) -> object:
            return run()

        def record(self, run: Callable[[], object]) -> tuple[object, Callable[[], None]]:
            self.runs += 1
            return run(), lambda: None

    monkeypatch.setattr(arms, "CudaRecorder", Recorder)
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
    assert arms.race_without_the_failed(runs, 1, lambda: None, rows) == {"small": [1.0]}
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
