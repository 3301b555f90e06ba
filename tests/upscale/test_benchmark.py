"""benchmarks/upscale.py: it runs on a small network, and what it writes is what answers the guide's claims."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmark_scripts import load_script
from redline.ladder.gate import Score
from redline.ladder.measurement import load_measurements
from redline.ladder.plan import Plan
from redline.machine.machine import Machine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield load_script("upscale")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["upscale.py", *map(str, arguments), "--device", "cpu", "--small"])
    assert script.main() == 0


def test_every_claim_finds_its_row(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a GPU's plans and planted times."""
    fp32, bf16 = "fused_ops + cuda_graph", "fused_ops + bf16 + cuda_graph"
    passed = Score("psnr", 50.0, 40.0, "higher", True)

    def arm(_bench: object, _module: object, plan: Plan, tiles: torch.Tensor, *_others: object) -> object:
        return sys.modules["upscale_harness"].Arm(lambda: tiles, 2**30 * len(tiles), 1.0, passed)

    def upscaling(settings: object) -> object:
        plan = fp32 if settings.precision == "fp32" else bf16  # type: ignore[attr-defined]
        return SimpleNamespace(tile_runner=SimpleNamespace(plan=Plan.parse(plan)))

    monkeypatch.setattr(script, "make_arm", arm)
    monkeypatch.setattr(script.Bench, "module", lambda bench: torch.nn.Identity())
    monkeypatch.setattr(script.Bench, "tiles", lambda bench, tile, count: torch.zeros(count, 3, 1, 1))
    monkeypatch.setattr(script.Bench, "peak_since", lambda bench, before: 2**30)
    monkeypatch.setattr(script, "Upscaling", upscaling)
    monkeypatch.setattr(script, "upscale_all", lambda *_: None)
    monkeypatch.setattr(script, "make_photos", lambda *_: [])
    claims = load_script("claims")
    _, all_claims = claims.load_claims(ROOT / "benchmarks/claims.toml")
    mine = [claim for claim in all_claims if claim.result.endswith(("upscale_claims.jsonl", "upscale_table.jsonl"))]
    folder = (tmp_path / mine[0].result).parent
    benches = {
        part: script.Bench(folder / f"upscale_{part}.jsonl", Machine.detect("cpu"), Path("none"), None, 4)
        for part in ("claims", "table")
    }
    script.measure_batches(benches["claims"], fp32, bf16)
    script.measure_streams(benches["claims"], 2, tmp_path, "bf16")
    script.measure_table(benches["table"], 2, tmp_path, ("fp32", "bf16"))
    assert len(mine) > 12
    for claim in mine:
        assert claims.measured(claim, tmp_path).startswith("**"), claim.quote


def test_photos_and_a_large_picture(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run(script, monkeypatch, "photos", "--out", out, "--count", 2, "--megapixels", 0.004, "--rounds", 2)
    run(script, monkeypatch, "huge", "--out", out, "--width", 700, "--height", 530, "--work", tmp_path / "work")
    photos, huge = load_measurements(out)
    assert photos.workload == "2 photos" and photos.options["share_of_model_only"] > 0
    assert photos.options["share_of_model_only"] <= photos.options["share_of_time_in_model"]
    assert huge.workload == "700x530" and huge.peak_bytes > 0 and huge.options["target_bytes"] > 0


@pytest.mark.usefixtures("any_precision")
def test_the_model_is_judged_by_its_worst_tile(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    common = ("model", "--out", out, "--tile", 32, "--rounds", 2, "--plan", "bf16")
    run(script, monkeypatch, *common)
    run(script, monkeypatch, *common, "--count", 3)
    one, three = (row for row in load_measurements(out) if row.plan == "bf16")
    assert three.options["tiles_compared"] == 3
    assert 20 < three.options["psnr_db"] <= one.options["psnr_db"] < 100
