"""How ceilings are computed from times; that they are sane on this machine is tested in test_machine.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from redline.machine import ceilings
from redline.machine.machine import Ceilings, Machine

CPU = torch.device("cpu")


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`taking(seconds)` makes every measurement return this time without running anything."""

    def take(seconds: float) -> None:
        monkeypatch.setattr(ceilings, "_best_seconds", lambda run, device: seconds)

    return take


def test_a_copy_reads_and_writes(taking: Callable[[float], None]) -> None:
    taking(0.5)
    assert ceilings._copy_rate(1024, CPU) == 2 * 4 * 1024 / 0.5


@pytest.mark.parametrize(("seconds", "side"), [(0.0005, 1024), (0.5 / 512, 1024), (0.00098, 128)])
def test_a_matmul_counts_two_operations_per_pair(seconds: float, side: int, taking: Callable[[float], None]) -> None:
    """The large matmul is skipped if the small one shows that the dtype is emulated."""
    taking(seconds)
    assert ceilings._matmul_rate(CPU, torch.float32) == 2 * side**3 / seconds
    assert ceilings._matmul_rate(CPU, torch.int8) == 2 * side**3 / seconds


@pytest.mark.parametrize(("seconds", "batch", "channels", "side"), [(0.04, 4, 128, 28), (0.041, 1, 64, 32)])
def test_a_3x3_convolution_counts_nine_products_per_pixel(
    seconds: float, batch: int, channels: int, side: int, taking: Callable[[float], None]
) -> None:
    taking(seconds)
    expected = 2 * batch * side * side * channels * channels * 9 / seconds
    assert ceilings._convolution_rate(CPU, torch.float32) == expected


@pytest.mark.parametrize(
    ("takes_s", "calls", "best_s"),
    [
        # At least three more runs, but none after four times the budget of 0.1 s.
        ([0.2, 0.12, 0.12, 0.12], 3, 0.12),
        ([0.04, 0.02, 0.01, 0.02, 0.03], 5, 0.01),
        ([1.0, 0.5, 0.5], 2, 0.5),
    ],
)
def test_the_fastest_of_several_runs_within_a_budget(
    takes_s: list[float], calls: int, best_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, left = [0.0], list(takes_s)

    def run() -> None:
        now_s[0] += left.pop(0)

    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: now_s[0])
    assert ceilings._best_seconds(run, CPU) == pytest.approx(best_s)
    assert len(takes_s) - len(left) == calls


@pytest.mark.parametrize(("rate", "exceeded"), [(1.09, False), (1.11, True)])
def test_a_ceiling_exceeded_by_a_tenth_is_rejected(
    rate: float, exceeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_matmul_rate", lambda device, dtype: rate)
    cached = Ceilings(1.0, {"fp32": 1.0}, {"fp32": 1.0})
    assert ceilings._is_exceeded(Machine.detect("cpu"), cached) is exceeded


def test_every_dtype_of_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(ceilings, "_copy_rate", lambda size, device: sizes.append(size) or 1.0)
    for name in ("_matmul_rate", "_convolution_rate"):
        monkeypatch.setattr(ceilings, name, lambda device, dtype: 2.0)
    monkeypatch.setattr(ceilings, "_onnxruntime_int8_rate", lambda: 3.0)

    def measured(**changes: Any) -> set[str]:
        machine = replace(Machine.detect("cpu"), **{"hardware_dtypes": (), "versions": {}, **changes})
        return set(ceilings.measure_ceilings(machine).matmul_flops_per_s)

    always = {"fp32", "bf16", "fp16", "int8"}
    assert measured() == always and sizes == 3 * [2**25]
    assert measured(hardware_dtypes=("tf32", "fp8")) == always | {"tf32", "fp8"}
    both = {"onnxruntime": "1", "onnx": "1"}
    assert measured(versions=both) == always | {"int8 (onnxruntime)"}
    assert measured(versions={"onnxruntime": "1"}) == measured(versions={"onnx": "1"}) == always


def test_a_busy_moment_does_not_lower_a_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(matmul: float) -> Ceilings:
        return Ceilings(1.0, {"fp32": matmul, "bf16": 5.0}, {"fp32": 4.0, "bf16": 6.0})

    def measured(*rates: float) -> tuple[Ceilings, int]:
        left = list(rates)
        monkeypatch.setattr(ceilings, "_measure_round", lambda machine, skipped: of(left.pop(0)))
        return ceilings.measure_ceilings(Machine.detect("cpu")), len(rates) - len(left)

    steady, rounds = measured(10.0, 9.9, 9.8)
    assert rounds == 3 and steady.matmul_flops_per_s["fp32"] == 10.0
    assert steady.spread == {"fp32": pytest.approx(0.02), "bf16": 0.0}
    # One slow round is outvoted by further ones; a machine that stays busy keeps a wide spread.
    found, rounds = measured(2.0, 10.0, 9.9, 9.8)
    assert rounds == 4 and found.matmul_flops_per_s["fp32"] == 10.0 and found.spread["fp32"] == pytest.approx(0.02)
    found, rounds = measured(2.0, 10.0, 4.0, 3.0, 5.0, 2.0)
    assert rounds == 6 and found.spread["fp32"] == pytest.approx(0.6)
