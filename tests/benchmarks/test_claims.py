"""docs/claims.md: complete, fresh, and computed from raw samples."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import load_script
from redline.errors import RedlineError
from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement, append

ROOT = Path(__file__).parents[2]


claims = load_script("claims")
RESULT = "benchmarks/results/test/unet.jsonl"
MACHINE = {
    "name": "Test GPU",
    "ceilings": {
        "bytes_per_s": 4.2e12,
        "matmul_flops_per_s": {"fp16": 719e12},
        "convolution_flops_per_s": {},
    },
}
EAGER = (0.0200, 0.0202, 0.0198, 0.0201, 0.0199)
FAST = tuple(value / 4 for value in EAGER)
PASSED = (Score("relative_error", 0.01, 0.02, "lower", True),)


def row(plan: str, role: str, samples: tuple[float, ...], **values: Any) -> Measurement:
    defaults: dict[str, Any] = {
        "workload": "unet",
        "verdict": "baseline" if role == "baseline" else "kept",
        "reason": "",
        "machine": MACHINE,
        "samples": {"": samples} if samples else {},
        "items": {"": 1.0},
        "unit": "frame",
        "run": "one",
        "scores": PASSED,
    }
    return Measurement(plan=plan, role=role, **{**defaults, **values})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Results as a climb leaves them."""
    gib = 2**30
    paired = {"against": "eager", "against_samples": {"": EAGER}}
    rows = [
        row("eager", "baseline", (9.9,), run="an older climb"),
        row("eager", "baseline", EAGER, peak_bytes=5 * gib, weight_bytes=2 * gib),
        row("bf16", "trial", FAST, peak_bytes=3 * gib, rung="bf16", **paired),
        row("bf16 + channels_last", "trial", (0.006,), verdict="dropped", rung="channels_last",
            peak_bytes=4 * gib, against="bf16", against_samples={"": (0.005,)}),
        row("fp16", "trial", (), rung="fp16", verdict="refused", reason="outside the gate"),
        row("compile", "compile", tuple(v / 2 for v in EAGER), verdict="baseline", **paired),
        row("compile(mode=reduce-overhead)", "compile", EAGER, verdict="baseline", **paired),
        row("bf16", "final", FAST, peak_bytes=3 * gib, **paired),
        row("eager", "final", EAGER, verdict="baseline", peak_bytes=6 * gib),
    ]  # fmt: skip
    for measurement in rows:
        append(tmp_path / RESULT, measurement)
    return tmp_path


def claim(**values: Any) -> Any:
    return claims.Claim(guide=1, topic="t", quote="q", meaning="m", **values)


def answer(root: Path, kind: str, **values: Any) -> str:
    return claims.measured(claim(result=RESULT, kind=kind, **values), root)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (
            "speedup",
            {"plan": "final", "against": "baseline"},
            "**4.00× (4.00–4.00)** with `bf16` on Test GPU",
        ),
        ("speedup", {"rung": "bf16"}, "**4.00× (4.00–4.00)**"),
        ("speedup", {"plan": "bf16", "against": "eager"}, "**4.00× (4.00–4.00)**"),
        ("speedup", {"plan": "compile", "against": "baseline"}, "**2.00× (2.00–2.00)** with `compile` on"),
        ("memory_saving", {"rung": "bf16"}, "**40.0% less (5.00 → 3.00 GiB)**"),
        ("saved_ms", {"rung": "bf16"}, "**15 ms less**"),
        ("saved_ms", {"rung": "channels_last"}, "**1 ms more**"),
        ("median_ms", {"plan": "final"}, "**5 ms**"),
        ("median_ms", {"plan": "eager"}, "**20 ms**"),
        ("fps", {"plan": "final"}, "**200 frames/s**"),
        ("peak_gib", {"plan": "baseline"}, "**5.00 GiB**"),
        ("memory_saving", {"plan": "final", "against": "baseline"}, "**40.0% less (5.00 → 3.00 GiB)**"),
        ("memory_saving", {"rung": "channels_last"}, "**33.3% more (3.00 → 4.00 GiB)**"),
        ("matmul_tflops", {"plan": "baseline", "dtype": "fp16"}, "**719 TFLOP/s**"),
        ("copy_tb_per_s", {"plan": "baseline"}, "**4.20 TB/s**"),
        ("weights_mib", {"plan": "baseline"}, "**2,048 MiB of weights**"),
        ("beside_weights_mib", {"plan": "baseline"}, "**3,072 MiB beside the weights**"),
    ],
)
def test_figures_come_from_the_samples(root: Path, kind: str, values: dict[str, str], expected: str) -> None:
    text = answer(root, kind, **values)
    assert text.startswith(expected)
    assert "[unet.jsonl](../benchmarks/results/test/unet.jsonl)" in text


def test_every_kind_is_tested() -> None:
    tested = {"speedup", "saved_ms", "median_ms", "fps", "peak_gib", "memory_saving", "matmul_tflops"}
    assert set(claims.KINDS) == tested | {"copy_tb_per_s", "throughput", "weights_mib", "beside_weights_mib"}


def test_no_file_no_row_no_figure(root: Path) -> None:
    assert claims.measured(claim(), root) == "not measured yet"
    missing = claim(result="benchmarks/results/none.jsonl", kind="fps", plan="final")
    assert claims.measured(missing, root) == "not measured yet"
    assert answer(root, "fps", plan="tf32").startswith("not measured yet ([unet.jsonl]")
    assert "has no `tensorrt`" in answer(root, "speedup", rung="tensorrt")


def test_a_refused_row_gives_its_reason_and_no_figure(root: Path) -> None:
    text = answer(root, "median_ms", rung="fp16")
    assert text.startswith("refused: outside the gate") and "ms" not in text


def test_a_red_gate_gives_no_figure(root: Path) -> None:
    red = (dataclasses.replace(PASSED[0], passed=False),)
    append(root / RESULT, row("tf32", "trial", FAST, scores=red, rung="tf32"))
    assert "**" not in answer(root, "median_ms", plan="tf32")


def test_bench_rows_are_interleaved_and_other_rows_are_not(root: Path) -> None:
    for workload in ("a", "b"):
        for plan, samples in (("eager", EAGER), ("bf16", FAST)):
            measurement = row(plan, "bench", samples, workload=workload, verdict="baseline", command="redline bench")
            append(root / "bench.jsonl", measurement)
    values = {"result": "bench.jsonl", "kind": "speedup", "plan": "bf16", "against": "eager"}
    assert claims.measured(claim(**values, workload="b"), root).startswith("**4.00× (4.00–4.00)**")
    with pytest.raises(RedlineError, match="contains a, b: set `workload`"):
        claims.measured(claim(**values), root)
    apart = answer(root, "speedup", plan="bf16 + channels_last", against="eager")
    assert apart.startswith("**3.33× (separate runs)**")


def test_a_plan_that_skips_many_layers_is_found_and_shown_in_brief(root: Path) -> None:
    skipped = " ".join(f"model.layers.{index}.mlp.down_proj" for index in range(9))
    append(root / RESULT, row(f"bf16 + int8(skip=[{skipped}])", "bench", FAST, verdict="baseline"))
    text = answer(root, "median_ms", plan="bf16 + int8(skip=[...])")
    assert text.startswith("**5 ms** with `bf16 + int8(skip=[...])` on Test GPU")
    assert answer(root, "median_ms", plan="int8(skip=[...])").startswith("not measured yet")


def test_rows_of_other_benchmarks_are_found_by_their_fields(tmp_path: Path) -> None:
    about = {"gpu": "Test GPU", "length": 8}
    rows = [
        {
            **about,
            "arm": "ours",
            "model_ms": 3.0,
            "frame_ms": 4.0,
            "tokens_per_s": 3000.0,
            "median_ms": 1.5,
            "peak_bytes": 2**31,
        },
        {**about, "arm": "theirs", "tokens_per_s": 2000.0, "median_ms": 3.0},
        {**about, "arm": "broken", "failure": "no room"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))

    def said(arm: str, figure: str, over: str = "") -> str:
        wanted = {"arm": arm, "length": 8}
        values = {"over": {"arm": over}} if over else {}
        return claims.measured(claim(result="rows.jsonl", row=wanted, figure=figure, **values), tmp_path)

    assert said("ours", "tokens_per_s").startswith("**3,000 tokens/s** on Test GPU")
    assert said("ours", "peak_bytes").startswith("**2.00 GiB**")
    assert said("ours", "busy_share").startswith("**75% of the time**")
    assert said("ours", "median_ms", "theirs").startswith("**2.00×**")
    assert said("ours", "tokens_per_s", "theirs").startswith("**1.50×**")
    assert said("broken", "median_ms").startswith("failed: no room")
    assert said("nobody", "median_ms").startswith("not measured yet")
    assert said("ours", "median_ms", "broken").startswith("not measured yet")


def test_turns_losses_and_points_are_compared_in_their_own_ways(tmp_path: Path) -> None:
    about = {"gpu": "Test CPU"}
    rows = [
        {**about, "arm": "fast", "rows": 1, "turn_ms": [1.0] * 9, "held_out_loss": 2.02, "median_ms": 1.0},
        {**about, "arm": "slow", "rows": 1, "turn_ms": [2.0] * 9, "held_out_loss": 2.0, "median_ms": 2.0},
        {**about, "arm": "fast", "rows": 2, "median_ms": 4.0},
        {**about, "arm": "slow", "rows": 2, "median_ms": 3.0},
        {**about, "arm": "memory", "by": "length", "points": [[1, 10], [2, 40], [4, 160]]},
        {**about, "arm": "memory", "by": "batch", "points": [[1, 10], [2, 20]]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))

    def said(figure: str, arm: str = "fast", over: str = "") -> str:
        values = {"over": {"arm": over}} if over else {}
        return claims.measured(claim(result="rows.jsonl", row={"arm": arm}, figure=figure, **values), tmp_path)

    assert said("turn_ms").startswith("**1 ms** on Test CPU")
    assert said("turn_ms", over="slow").startswith("**2.00× (2.00–2.00)**")
    assert said("held_out_loss", over="slow").startswith("**+1.00% loss**")
    assert said("wins", over="slow").startswith("**faster in 1 of 2 sizes (0.75× to 2.00×)**")
    assert said("growth", arm="memory").startswith("**grows with length^2.00 × batch^1.00**")


def test_a_claim_may_name_a_test_or_a_reason(tmp_path: Path) -> None:
    assert claims.measured(claim(blocked="no such GPU"), ROOT) == "cannot be measured here: no such GPU"
    test = "tests/benchmarks/test_claims.py::test_a_claim_may_name_a_test_or_a_reason"
    assert claims.measured(claim(test=test), ROOT).startswith("**true**, checked by the test [test_a_claim")
    assert claims.measured(claim(test=test), tmp_path).startswith("not measured yet")
    assert claims.measured(claim(test=f"{test}_or_neither"), ROOT).startswith("not measured yet")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"blocked": "no GPU", "result": RESULT}, "name one of result, test and blocked"),
        ({"result": RESULT}, "belong together"),
        ({"result": RESULT, "kind": "sped", "plan": "eager"}, "unknown kind 'sped'"),
        ({"result": RESULT, "kind": "fps"}, "either the plan or the rung"),
        ({"result": RESULT, "kind": "fps", "plan": "bf17"}, "unknown rung 'bf17'"),
        ({"result": RESULT, "row": {"arm": "ours"}, "figure": "speed"}, "a figure from tokens_per_s"),
        ({"row": {"arm": "ours"}, "figure": "median_ms"}, "a row needs a result"),
    ],
)
def test_a_wrong_claim_raises_by_name(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(RedlineError, match=problem):
        claims._check(claim(**values), {1: {}})


def test_the_committed_page_is_fresh_and_a_stale_one_is_found(tmp_path: Path) -> None:
    assert claims.main(["--check"]) == 0
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/claims.toml").write_text((ROOT / "benchmarks/claims.toml").read_text())
    assert claims.main(["--check"], tmp_path) == 1
    assert claims.main([], tmp_path) == 0
    assert claims.main(["--check"], tmp_path) == 0
    page = tmp_path / "docs/claims.md"
    page.write_text(page.read_text().replace("not measured yet", "5× faster", 1))
    assert claims.main(["--check"], tmp_path) == 1


def test_every_guide_has_claims_with_a_meaning() -> None:
    guides, found = claims.load_claims(ROOT / "benchmarks/claims.toml")
    assert set(guides) == {1, 2, 3, 4, 5} == {c.guide for c in found}
    assert all(c.quote and c.meaning and c.topic for c in found)
    assert len({(c.guide, c.quote) for c in found}) == len(found)


def test_rows_are_found_by_what_lies_inside_of_their_fields() -> None:
    rows = [{"arm": {"name": "a"}, "side": 64}, {"arm": {"name": "b"}, "side": 64}, {"side": 32}]
    assert [claims._matches(row, {"arm.name": "b", "side": 64}) for row in rows] == [False, True, False]
    assert not any(claims._matches(row, {"arm.name": "b", "side": 32}) for row in rows)
