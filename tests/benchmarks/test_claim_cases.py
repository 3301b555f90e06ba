"""The cases of claims_cpu.py and claims_gpu.py: rows, turns and memory peaks, at tiny sizes on the CPU."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark_scripts import load_script

claim_cases = load_script("claim_cases")
claims_cpu = load_script("claims_cpu")
claims_gpu = load_script("claims_gpu")
training = load_script("claims_gpu_training")
CLAIMS = Path(claims_gpu.__file__).with_name("claims.toml")
BENCH = claim_cases.Bench(torch.device("cpu"), tiny=True)


def test_a_failed_case_and_a_late_case_have_rows_with_the_reason(tmp_path: Path) -> None:
    def works(bench: object) -> list[dict[str, object]]:
        return [{"case": "works", "arm": "one"}]

    def fails(bench: object) -> list[dict[str, object]]:
        raise ValueError("broken")

    claim_cases.run({"works": works, "fails": fails}, BENCH, tmp_path / "rows.jsonl", 60.0)
    first, second = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert first["arm"] == "one" and "failure" not in first
    assert first["gpu"] and first["torch"] and first["command"] and first["tiny"]
    assert second["failure"] == "ValueError: broken"
    (late,) = claim_cases.run({"works": works}, BENCH, tmp_path / "late.jsonl", -1.0)
    assert "--limit-s" in late["failure"]


def test_arms_take_turns_and_rounds_alternate() -> None:
    called: list[str] = []
    turns = BENCH.turns_ms({"a": lambda: called.append("a"), "b": lambda: called.append("b")})
    assert [len(turns[name]) for name in "ab"] == [2, 2]
    assert called[-4:] == ["b", "a", "a", "b"]


def test_an_arm_that_fails_is_left_out_of_the_turns() -> None:
    broken, works = BENCH.timed("case", {"broken": lambda: 1 / 0, "works": lambda: None})
    assert broken["failure"].startswith("ZeroDivisionError") and "turn_ms" not in broken
    assert len(works["turn_ms"]) == 2


def test_the_peak_counts_what_is_held_at_the_same_time() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.uint8)

    def together() -> list[torch.Tensor]:
        return [torch.empty(2**20, dtype=torch.uint8) for _ in range(3)]

    assert claim_cases.cpu_peak_bytes(one_after_the_other) == pytest.approx(2**20, rel=0.01)
    assert claim_cases.cpu_peak_bytes(together) == pytest.approx(3 * 2**20, rel=0.01)


def test_both_definitions_of_the_squared_error_are_compared_with_fp64() -> None:
    rows = claims_cpu.squared_error(BENCH)
    assert {row["arm"] for row in rows} == {"F.mse_loss", "stable_mse_loss"}
    assert all(row["overflow_share"] == 1 for row in rows if row["spread"] == 100)
    assert all(0 < row["median_error"] < 0.01 for row in rows if row["spread"] < 100)


@pytest.mark.parametrize(
    "case", ["alignment", "head_sizes", "optimizer", "checkpointing", "attention_blocks", "blocks"]
)
def test_gpu_cases_run_at_tiny_sizes(case: str) -> None:
    rows = claims_gpu.CASES[case](BENCH)
    assert rows and all("failure" not in row for row in rows)
    assert len({(row["arm"], row.get("dtype")) for row in rows}) == len(rows)


def test_the_climb_for_memory_leaves_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def climb(workload: str, *, out: str, **about: object) -> SimpleNamespace:
        assert workload.endswith("tiny_workloads.py:convolutions") and about["objective"] == "memory"
        measurements = Path(out) / "measurements.jsonl"
        measurements.write_text("rows")
        final = SimpleNamespace(peak_bytes=5)
        return SimpleNamespace(plan="keep_memory", final=final, files={"measurements": measurements})

    monkeypatch.setattr(claims_gpu, "climb", climb)
    (row,) = claims_gpu.memory_climb(replace(BENCH, folder=tmp_path))
    assert row["plan"] == "keep_memory" and row["peak_bytes"] == 5
    assert (tmp_path / "unet_880m-memory.jsonl").read_text() == "rows"


def test_every_claim_that_waits_for_a_gpu_has_its_case() -> None:
    """Each row of claims.toml that names a result of claims_gpu.py names a case and an arm that the script has."""
    claims = tomllib.loads(CLAIMS.read_text())["claim"]
    waiting = [claim for claim in claims if "h200/claims/" in claim.get("result", "")]
    cases = {claim["row"]["case"].replace(" ", "_") for claim in waiting if claim["result"].endswith("gpu.jsonl")}
    assert cases and cases <= set(claims_gpu.CASES)
    others = {Path(claim["result"]).name for claim in waiting} - {"gpu.jsonl"}
    assert others == {"unet_880m-memory.jsonl"}


def test_the_best_rate_is_the_vertex_of_the_parabola() -> None:
    xs = [math.log(2.0**power) for power in range(5)]
    assert training._vertex(xs, [(x - 1.5) ** 2 + 2 for x in xs]) == pytest.approx(1.5)
    assert training._vertex(xs, [5.0, 4.0, 3.0, 2.0, 1.0]) == xs[-1]
    assert training._vertex(xs, [3.0, 1.0, math.nan, math.nan, math.inf]) == xs[1]


def test_a_restarted_training_repeats_itself() -> None:
    made = training._Training(BENCH, batch=2, length=8)
    tokens = torch.arange(16).reshape(2, 8)
    losses = []
    for _ in range(2):
        made.restart()
        for _ in range(3):
            made.step(1e-2, tokens, tokens)
        losses.append(made.model(tokens).sum().item())
    assert losses[0] == losses[1]
    made.step(1e-2, tokens, tokens)
    assert made.model(tokens).sum().item() != losses[0]
