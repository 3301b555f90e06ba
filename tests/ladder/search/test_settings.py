"""Settings of a climb, and a machine that was read in another process."""

from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.ladder.plan import parse_rung
from redline.ladder.search.preparation import machine_from_dict
from redline.ladder.search.settings import Settings, read_duration, read_rungs
from redline.ladder.shape_ranges import read_shapes
from redline.machine.machine import Machine


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"reference": "fp16"}, "unknown reference precision 'fp16': choose fp32 or fp64"),
        (
            {"only": read_rungs(["bf16", "compile"]), "without": read_rungs(["compile(mode=default)"])},
            "compile is both in the rungs to try and in those to leave out",
        ),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        Settings("resnet", **values)


def test_values_are_read_from_text_or_taken_as_they_are() -> None:
    assert read_rungs(["tf32", parse_rung("bf16")]) == (parse_rung("tf32"), parse_rung("bf16"))
    with pytest.raises(RedlineError, match="no_such_rung"):
        read_rungs(["no_such_rung"])
    assert (read_duration("16ms"), read_duration(90)) == (0.016, 90.0)
    assert read_shapes(None) == read_shapes({}) == {"": {}}
    assert read_shapes([{"batch": 8, "size": 64}]) == {"batch=8,size=64": {"batch": 8, "size": 64}}
    assert Settings("resnet", Path("out")).measurements_path == Path("out/measurements.jsonl")
    assert Settings("resnet").measurements_path is None


def test_a_machine_comes_back_from_another_process() -> None:
    machine = Machine.detect("cpu")
    again = machine_from_dict(machine.as_dict())
    assert again == machine and again.ceilings == machine.ceilings
