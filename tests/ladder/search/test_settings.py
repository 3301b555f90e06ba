"""What a climb is asked to do, and a machine as it comes from another process."""

from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.ladder.search.settings import Settings, machine_from_dict
from redline.ladder.search.target import Target
from redline.machine.machine import Machine


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"reference": "fp16"}, "fp32 or fp64, not 'fp16'"),
        ({"objective": "beauty"}, "beauty"),
        ({"only": ("no_such_rung",)}, "no_such_rung"),
        ({"without": ("no_such_rung",)}, "no_such_rung"),
        ({"only": ("bf16", "compile"), "without": ("compile",)}, "compile is both to be tried and to be left out"),
    ],
)
def test_what_cannot_be_asked_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        Settings("resnet", Path("out"), **values)


def test_a_target_is_one_of_time_or_of_memory() -> None:
    settings = Settings("resnet", Path("out"), reference="fp64", only=("bf16",), without=("compile",))
    assert settings.target is None and settings.measurements_path == Path("out/measurements.jsonl")
    assert Settings("resnet", Path("out"), target_s=0.1).target == Target(0.1, None)
    assert Settings("resnet", Path("out"), target_bytes=5).target == Target(None, 5)


def test_a_machine_comes_back_from_another_process() -> None:
    machine = Machine.detect("cpu")
    again = machine_from_dict(machine.as_dict())
    assert again == machine and again.ceilings == machine.ceilings
