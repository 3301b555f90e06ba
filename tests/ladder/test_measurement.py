"""Measurement files: they round-trip, and malformed files raise an error."""

import json
from pathlib import Path

import pytest

from redline.errors import MeasurementError
from redline.ladder.gate import Score
from redline.ladder.measurement import SCHEMA, Measurement, append, load_measurements


def measurement(**values: object) -> Measurement:
    base: dict = {
        "workload": "resnet",
        "plan": "eager",
        "role": "baseline",
        "verdict": "baseline",
        "reason": "",
        "machine": {"name": "m"},
        "samples": {"": (1.0, 2.0, 3.0)},
        "scores": (Score("relative_error", 0.001, 0.02, "lower", True),),
    }
    return Measurement(**{**base, **values})


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    rows = [
        measurement(),
        measurement(
            plan="bf16",
            role="trial",
            verdict="kept",
            scores=(Score("psnr", float("nan"), 1, "higher", False),),
        ),
    ]
    for row in rows:
        append(path, row)
    seen = load_measurements(path)
    assert seen[0] == rows[0]
    assert seen[1].scores[0].value != seen[1].scores[0].value and not seen[1].passed


def test_a_killed_climb_loses_only_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append(path, measurement())
    with path.open("a") as file:
        file.write(measurement().to_json()[:50])
    assert len(load_measurements(path)) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no measurements"),
        ("{oops}\n", "line 1, cannot be read: it is not JSON"),
        ("[]\n", "is not a measurement"),
        ('{"schema": "x"}\n', "no integer `schema`"),
        (json.dumps({"schema": SCHEMA + 1}) + "\n", "this Redline reads up to"),
        (json.dumps({"schema": SCHEMA}) + "\n", "damaged"),
        (json.dumps({"schema": SCHEMA, "colour": 1}) + "\n", "field 'colour'"),
    ],
)
def test_bad_files(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=sentence):
        load_measurements(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="cannot read"):
        load_measurements(tmp_path / "none.jsonl")


def test_statistics_are_derived() -> None:
    row = measurement(against="eager", against_samples={"": (2.0, 4.0, 6.0)}, items={"": 8.0})
    assert row.median_s() == 2.0 and row.throughput() == 4.0
    speedup = row.speedup()
    assert speedup is not None and speedup.middle == pytest.approx(2.0)
