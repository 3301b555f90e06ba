"""`redline verify`: exit code 0 if a plan holds, 1 if one of its rungs no longer does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import planted_rungs
from redline.ladder.plan import Plan

from .conftest import Seen

PLANTED = Path(__file__).parents[1] / "planted_rungs.py"
ARGUMENTS = [f"{PLANTED}:ticks", "--device", "cpu", "--sampling", "1s"]


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    planted_rungs.plant()
    yield
    planted_rungs.uproot()


def test_a_plan_that_holds(command: Callable[..., Seen], tmp_path: Path) -> None:
    """Judged by what it was found for: for memory, planted_fast uses equal memory, and is faster."""
    replace(Plan.parse("planted_fast"), objective="memory").save(tmp_path / "plan.toml")
    seen = command("verify", "plan.toml", *ARGUMENTS, "--shapes", "batch=3..5", "--json")
    said = seen.json()
    assert said["ranges"] == ["batch=3..5 (3 sizes): sets up again nowhere; falls back nowhere"]
    assert seen.code == 0 and said["holds"] and said["plan"] == "planted_fast"
    assert said["objective"] == "memory" and said["rungs"][0]["reason"].startswith("equal memory, and faster: ")
    assert said["speedup"]["low"] > 1.5 and [row["holds"] for row in said["rungs"]] == [True]


@pytest.mark.slow
def test_a_rung_that_is_worth_nothing(command: Callable[..., Seen]) -> None:
    seen = command("verify", "planted_fast + planted_useless", *ARGUMENTS, "--shapes", "batch=3..5")
    assert seen.code == 1
    assert "batch=3..5 (3 sizes): sets up again nowhere; falls back nowhere" in seen.out
    assert "judged by latency" in seen.out
    assert "does not hold: no longer holds: planted_useless" in seen.out
    table = [line.split()[:2] for line in seen.out.splitlines()]
    assert ["planted_fast", "yes"] in table and ["planted_useless", "no"] in table


def test_a_plan_that_turns_the_gate_red(command: Callable[..., Seen]) -> None:
    seen = command("verify", "planted_wrong", *ARGUMENTS, "--json")
    said = seen.json()
    assert seen.code == 1 and "outside the gate" in said["reason"] and said["speedup"] is None


def test_a_rung_that_cannot_run_here(command: Callable[..., Seen]) -> None:
    seen = command("verify", "tf32", *ARGUMENTS, "--json")
    said = seen.json()
    assert seen.code == 1 and not said["holds"] and said["median_s"] is None
    assert "cannot run here" in said["reason"] and said["rungs"][0]["reason"]


def test_a_rung_that_does_not_apply_to_this_model_is_named(command: Callable[..., Seen]) -> None:
    """A plan of another model: there is no attention here."""
    seen = command("verify", "sdpa + planted_fast", *ARGUMENTS, "--json")
    said = seen.json()
    assert seen.code == 1 and "the plan does not run" in said["reason"]
    verdicts = {row["rung"]: (row["holds"], row["reason"]) for row in said["rungs"]}
    assert verdicts["sdpa"] == (False, "the plan runs without this rung") and verdicts["planted_fast"][0]
