"""`redline bench lsd`: invalid shapes are reported, and a shape that fails does not end the others."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.stream import benchmark
from redline.stream.matrix import PLAIN, Arm, Row, Shape

from .conftest import Seen
from .test_bad_input import assert_one_sentence

LIGHT, TINY = Shape("light", 17, 1, 61), Shape("tiny", 17, 1, 61)
GIVEN = ("--shapes", "size=light,side=17,frames=61", "--shapes", "side=17,frames=61", "--device", "cpu")


def made_up(monkeypatch: pytest.MonkeyPatch, rows: dict[Shape, list[Row]]) -> None:
    def measure(shape: Shape, arms: Sequence[Arm], device: torch.device, **_: Any) -> Iterator[Row]:
        yield from rows[shape]

    monkeypatch.setattr(benchmark, "measure", measure)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ("side=abc", "side = 'abc' of the live model must be a whole number"),
        ("frames=1.5", "frames = 1.5 of the live model must be a whole number"),
    ],
)
def test_invalid_shapes_are_reported(shape: str, sentence: str, command: Callable[..., Seen]) -> None:
    assert_one_sentence(command("bench", "lsd", "--shapes", shape, "--device", "cpu"), sentence)


def test_shapes_go_on_after_a_plain_arm_that_fails(
    tmp_path: Path, command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, fine = Row(LIGHT, PLAIN, "cpu", failure="out of memory"), Row(TINY, PLAIN, "cpu", frames_per_s=31.0)
    made_up(monkeypatch, {LIGHT: [failed], TINY: [fine]})
    seen = command("bench", "lsd", *GIVEN, "--save", "rows.jsonl")
    assert seen.code == 1 and "out of memory" in seen.out and "31" in seen.out
    assert [json.loads(line)["failure"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [
        "out of memory",
        "",
    ]


def test_lost_device_ends_the_benchmark(command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Row(LIGHT, Arm("TF32", "tf32"), "cpu", failure="gone; the device is lost", device_lost=True)
    made_up(monkeypatch, {LIGHT: [Row(LIGHT, PLAIN, "cpu"), lost]})
    seen = command("bench", "lsd", *GIVEN)
    assert seen.code == 1 and "the device is lost" in seen.out and "tiny" not in seen.out


def test_fallback_to_another_plan_is_shown(command: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    half = Arm("fp16", "fp16 + channels_last")
    rows = [Row(TINY, half, "cpu", plan=plan) for plan in ("bf16 + channels_last", "fp16 + channels_last")]
    made_up(monkeypatch, {LIGHT: [], TINY: rows})
    seen = command("bench", "lsd", *GIVEN)
    assert seen.code == 0 and seen.out.count("(as ") == 1


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("eager", PLAIN),
        ("eager + loop", Arm("eager + loop", "eager", overlapped=False)),
        ("fp16 + compile + graph", Arm("fp16 + compile + graph", "fp16 + compile", graph=True)),
    ],
)
def test_a_plan_may_end_with_how_frames_are_run(text: str, arm: Arm) -> None:
    assert benchmark.read_arm(text) == arm
