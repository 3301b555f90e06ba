"""benchmarks/train_speed.py on toys: every arm trains or says why not, and peers do not patch each other."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmark_scripts import load_script

train_speed = load_script("train_speed")


def rows(out: Path, *options: str) -> list[dict[str, Any]]:
    assert train_speed.main(["--tiny", "--rounds", "2", "--out", str(out), *options]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_both_models_train_at_every_shape(tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.jsonl", "--only", "redline")
    assert [(row["length"], row["batch"]) for row in found] == [(64, 2), (64, 2), (96, 1), (96, 1)]
    for row in found:
        assert row["tokens_per_s"] > 0 and row["mfu"] > 0 and len(row["step_s"]) == 2, row
        assert row["arm"].startswith("redline") and row["proofs"]["fused_ops"]


def test_arms_can_be_asked_for_in_other_ways_too(tmp_path: Path) -> None:
    also = ("--also", "fastest kernels", "--also", "512 slots")
    found = rows(tmp_path / "rows.jsonl", "--only", "redline", "--length", "64", *also)
    kinds = [row["arm"].removesuffix(", fused_ops") for row in found]
    ways = ["decoder", "decoder, fastest kernels", "memory", "memory, fastest kernels", "memory, 512 slots"]
    assert kinds == [f"redline {way}" for way in ways]
    assert all(row["tokens_per_s"] > 0 for row in found) and found[4]["parameters"] > found[2]["parameters"]


def test_an_arm_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> Any:
        return train_speed.Arm(lambda index: torch.tensor(3.0 + index), nn.Linear(1, 1), 1.0)

    def broken(*_: object) -> Any:
        raise RuntimeError("no kernels here")

    monkeypatch.setattr(train_speed, "ours", wrong)
    monkeypatch.setattr(train_speed, "theirs", lambda *_, **__: broken())
    found = rows(tmp_path / "rows.jsonl", "--length", "96", "--plan", "")
    assert [row["failure"] for row in found] == [
        *["ArithmeticError: the first loss is 3.000, but a uniform prediction has 6.238"] * 2,
        *["RuntimeError: no kernels here"] * 2,
    ]


def test_no_arm_is_set_up_after_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(tmp_path / "rows.jsonl", "--length", "64", "--limit-s", "0")
    assert len(found) == 4 and all("--limit-s" in row["failure"] for row in found)
    assert "64 × 2, transformers + torch.compile: skipped" in capsys.readouterr().out


def killed_at(step: int) -> Any:
    def train(index: int) -> torch.Tensor:
        if index == step:
            raise KeyboardInterrupt
        return torch.tensor(6.2)

    return train_speed.Arm(train, nn.Linear(1, 1), 1.0)


def test_a_run_that_is_killed_leaves_what_it_had_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its second round, the first shape done before."""
    second_round = 3 + train_speed.STEPS_OF_A_TURN
    monkeypatch.setattr(train_speed, "ours", lambda race, *_: killed_at(second_round if race.length == 96 else -1))
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        rows(out, "--only", "redline", "--plan", "")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["length"], len(row["step_s"])) for row in found] == [(64, 2), (64, 2), (96, 1), (96, 1)]
    assert all(row["tokens_per_s"] > 0 and "failure" not in row for row in found)


def test_an_arm_that_was_ready_says_that_it_was_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is killed while it is made ready."""
    monkeypatch.setattr(train_speed, "ours", lambda _, kind, *__: killed_at(1 if kind == "memory" else -1))
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        rows(out, "--length", "64", "--only", "redline", "--plan", "")
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["arm"] == "redline decoder" and row["first_loss"] == pytest.approx(6.2)
    assert row["failure"] == train_speed.CUT_OFF


def test_a_package_without_metadata_has_an_unknown_version() -> None:
    assert train_speed.version_of("torch") == torch.__version__
    assert train_speed.version_of("a-package-of-nobody") == "unknown"


def test_what_liger_patches_for_all_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SimpleNamespace(rotate="theirs", norm="theirs", other=1)
    patched: list[object] = []

    def apply(model: object) -> None:
        patched.append(model)
        shared.rotate = "liger's"

    liger = ModuleType("liger_kernel")
    transformers = ModuleType("liger_kernel.transformers")
    transformers.apply_liger_kernel_to_llama = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", liger)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    model = nn.Linear(1, 1)
    patches = train_speed.liger_patches(model, shared)
    assert patched == [model] and patches == {"rotate": "liger's"} and shared.rotate == "theirs"
    with pytest.raises(ZeroDivisionError), train_speed.attributes(shared, patches):
        assert shared.rotate == "liger's"
        _ = 1 / 0
    assert shared.rotate == "theirs"


def test_ours_and_theirs_are_the_same_size() -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers
    race = train_speed.Race(64, 2, tiny=True)
    one, other = train_speed.ours(race, "decoder", ""), train_speed.theirs(race, compiled=False, liger=False)
    assert one.flops_per_token == other.flops_per_token
    assert abs(float(one.step(0)) - float(other.step(0))) < 0.3
    full = train_speed.Race(2048, 32, tiny=False).training("decoder", train_speed.PLAN)
    assert full.tokens_per_step == 65_536 and full.loop.asked_precision == "bf16"
