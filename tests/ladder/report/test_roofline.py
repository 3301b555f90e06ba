"""The roofline: the floor is the longer of arithmetic and memory, and unknown stays unknown."""

import math

import pytest

from redline.ladder.measurement import Measurement
from redline.ladder.report.roofline import place

MACHINE = {
    "ceilings": {
        "bytes_per_s": 1e12,
        "matmul_flops_per_s": {"fp32": 5e13, "bf16": 8e14},
        "convolution_flops_per_s": {"fp32": 6e13},
    }
}


def measured(**changes):
    values = {
        "workload": "w",
        "plan": "eager",
        "role": "baseline",
        "verdict": "baseline",
        "reason": "",
        "machine": MACHINE,
        "samples": {"": (0.02, 0.01, 0.03)},
        "flops": {"": 6e11},
        "least_bytes": {"": 1e9},
    }
    return Measurement(**{**values, **changes})


def test_arithmetic_bound_uses_the_best_rate_of_the_dtype():
    found = place(measured())
    assert found is not None
    assert found.bound == "arithmetic"
    assert found.ceiling_flops_per_s == 6e13
    assert found.ceiling_bytes_per_s == 1e12
    assert found.floor_s == pytest.approx(0.01)
    assert found.share == pytest.approx(0.5)
    assert found.achieved_flops_per_s == pytest.approx(3e13)
    assert found.intensity == pytest.approx(600)


def test_memory_bound_when_the_bytes_take_longer():
    found = place(measured(precision="bf16", least_bytes={"": 1e10}))
    assert found is not None
    assert found.bound == "memory"
    assert found.floor_s == pytest.approx(0.01)


def test_shape_picks_its_own_figures():
    two = {
        "samples": {"a": (1.0,), "b": (2.0,)},
        "flops": {"a": 6e12, "b": 6e13},
        "least_bytes": {"a": 1.0, "b": 1.0},
    }
    first, second = place(measured(**two)), place(measured(**two), "b")
    assert first is not None and second is not None
    assert first.share == pytest.approx(0.1)
    assert second.share == pytest.approx(0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": {}},
        {"samples": {"": ()}},
        {"machine": {}},
        {"machine": {"ceilings": None}},
        {"machine": {"ceilings": {"bytes_per_s": 1e12}}},
        {"flops": {}},
        {"flops": {"": 0.0}},
        {"least_bytes": {"": math.nan}},
        {"precision": "fp8"},
    ],
)
def test_unknown_stays_unknown(changes):
    assert place(measured(**changes)) is None


def test_unknown_shape_stays_unknown():
    assert place(measured(), "no such shape") is None


def test_exceeded_ceiling_is_ignored():
    """The floor is 10 ms; an engine's own int8 kernels can be many times faster than the product it was taken from."""
    assert place(measured(samples={"": (0.0095, 0.0095)})) is not None
    assert place(measured(samples={"": (0.002, 0.002)})) is None
