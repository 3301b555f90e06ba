"""The machine, and the decisions that its measured rates lead to."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from redline.errors import MachineError
from redline.ladder.job import Job
from redline.ladder.rungs.fp16 import Fp16
from redline.machine.ceilings import with_ceilings
from redline.machine.load import Load
from redline.machine.machine import Ceilings, Machine, resolve_device

CPU = replace(Machine.detect("cpu"), ceilings=None)
# fp16 convolutions are fast and fp16 matmul is emulated, as on a Neoverse-N1; bf16 is fully emulated.
RATES = Ceilings(
    1e10,
    {"fp32": 100.0, "fp16": 1.0, "bf16": 1.0, "int8": 10.0, "int8 (onnxruntime)": 400.0},
    {"fp32": 80.0, "fp16": 160.0, "bf16": 1.0},
)
ODD = replace(CPU, ceilings=RATES, hardware_dtypes=("fp32", "fp16"))


def test_an_emulated_dtype_is_known_by_its_rate() -> None:
    assert "emulates bf16" in ODD.why_slow("bf16")
    assert not ODD.why_slow("fp16") and not ODD.why_slow("fp16", "convolution")
    assert "in matrix products: measured at 1.0%" in ODD.why_slow("fp16", "matmul")
    assert "emulates int8" in ODD.why_slow("int8")


def test_without_rates_the_hardware_list_decides() -> None:
    plain = replace(ODD, ceilings=None)
    assert not plain.why_slow("fp16") and "no hardware support for bf16" in plain.why_slow("bf16")


def test_a_quarter_of_the_rate_of_fp32_is_not_emulated() -> None:
    rates = Ceilings(1e10, {"fp32": 100.0, "bf16": 25.0, "fp16": 24.0}, {"fp32": 100.0, "bf16": 25.0, "fp16": 24.0})
    machine = replace(CPU, ceilings=rates)
    assert not machine.why_slow("bf16") and "measured at 24.0%" in machine.why_slow("fp16", "convolution")
    assert "in convolutions" in machine.why_slow("fp16", "convolution") and " in " not in machine.why_slow("fp16")[:60]


def test_a_ceiling_is_the_rate_of_the_fastest_engine() -> None:
    assert RATES.flops_per_s("int8") == 400 and RATES.flops_per_s("fp16") == 160 and RATES.flops_per_s("tf32") == 100


def test_the_rung_decides_by_the_dominant_operation_of_the_model() -> None:
    samples = (torch.randn(1, 3, 8, 8),)
    convolutions = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 16, 2))
    products = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.Linear(64, 2))
    assert Job.of(convolutions).mostly == "convolution" and not Fp16().why_not(ODD, Job.of(convolutions, samples))
    assert Job.of(products).mostly == "matmul" and "products" in Fp16().why_not(ODD, Job.of(products, samples))
    assert Job.of(nn.ReLU()).mostly == ""


def test_the_precision_to_start_from() -> None:
    assert ODD.recommended_precision()[0] == "fp32"
    fast = Ceilings(1e12, {"fp32": 1.0, "bf16": 8.0, "fp16": 8.5}, {"fp32": 1.0, "bf16": 6.0, "fp16": 6.0})
    assert replace(CPU, ceilings=fast).recommended_precision()[0] == "bf16"
    half = Ceilings(1e12, {"fp32": 1.0, "bf16": 0.1, "fp16": 8.0}, {"fp32": 1.0, "bf16": 0.1, "fp16": 6.0})
    assert replace(CPU, ceilings=half).recommended_precision()[0] == "fp16"
    # bf16 is chosen if it has at least 80% of the fp16 rate and also helps in convolutions.
    near = Ceilings(1e12, {"fp32": 1.0, "bf16": 8.0, "fp16": 10.0}, {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0})
    assert replace(CPU, ceilings=near).recommended_precision()[0] == "bf16"
    far = replace(near, matmul_flops_per_s={"fp32": 1.0, "bf16": 7.0, "fp16": 10.0})
    assert replace(CPU, ceilings=far).recommended_precision()[0] == "fp16"
    slow = replace(near, convolution_flops_per_s={"fp32": 1.0, "bf16": 1.1, "fp16": 1.1})
    assert replace(CPU, ceilings=slow).recommended_precision()[0] == "fp32"
    assert replace(CPU, hardware_dtypes=("fp32", "bf16")).recommended_precision()[0] == "bf16"
    assert replace(CPU, hardware_dtypes=("fp32",)).recommended_precision()[0] == "fp32"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The cache is this file's own: other processes of the tests may measure ceilings meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        # A CPU may need seconds to emulate fp16.
        patch.setattr("redline.machine.ceilings._FLOATS", {"fp32": torch.float32, "bf16": torch.bfloat16})
        patch.setattr("redline.machine.ceilings._LONGEST_S", 0.0)  # one round; `test_ceilings` counts the rounds
        patch.setenv("REDLINE_CACHE", str(tmp_path_factory.mktemp("ceilings")))
        yield with_ceilings(CPU, again=True)


@pytest.mark.parametrize("rate", [24.0, 26.0])
def test_a_rate_too_close_to_the_limit_does_not_make_a_dtype_come_and_go(rate: float) -> None:
    rates = {"fp32": 100.0, "bf16": rate}
    noisy = Ceilings(1e10, rates, rates, {"fp32": 0.05, "bf16": 0.1})
    machine = replace(Machine.detect("cpu"), ceilings=noisy, hardware_dtypes=("fp32",))
    assert "no hardware support" in machine.why_slow("bf16")
    assert replace(machine, hardware_dtypes=("fp32", "bf16")).why_slow("bf16") == ""
    steady = replace(machine, ceilings=replace(noisy, spread={}))
    assert bool(steady.why_slow("bf16")) is (rate < 25)


def test_measured_ceilings_are_sane_and_cached(measured: Machine) -> None:
    assert measured.ceilings is not None
    assert 1e8 < measured.ceilings.bytes_per_s < 1e13
    assert 1e8 < measured.ceilings.matmul_flops_per_s["fp32"] < 1e15
    assert Machine.detect("cpu").ceilings == measured.ceilings
    assert (
        torch._C._get_mkldnn_enabled()
    )  # restored after the first bf16 matmul, which disables it on a CPU without bf16


def test_cached_ceilings_need_not_have_the_dtypes_that_a_cpu_limit_hides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setenv("REDLINE_CPU_LIMIT", "avx2")
    ceilings = Ceilings(1e9, {"fp32": 1e9}, {"fp32": 1e9})
    path = Machine.detect("cpu").cache_path
    path.write_text(json.dumps(asdict(ceilings)))
    assert Machine.detect("cpu").ceilings == ceilings


def test_an_exceeded_ceiling_is_measured_again(measured: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured.ceilings is not None
    monkeypatch.setattr("redline.machine.ceilings.current_load", lambda: Load(0.0))
    rates = {"fp32": 1.0, "bf16": 1.0, "fp16": 1.0, "int8": 1.0}
    low = replace(measured.ceilings, matmul_flops_per_s=rates, spread={})
    calls = []
    monkeypatch.setattr("redline.machine.ceilings.measure_ceilings", lambda m: calls.append(m) or measured.ceilings)
    assert with_ceilings(replace(measured, ceilings=low)).ceilings != low and calls
    # Ceilings that differed from round to round are measured again after an hour, but never beside other load.
    unsteady = replace(measured, ceilings=replace(measured.ceilings, spread={"fp32": 0.5}))
    monkeypatch.setattr("redline.machine.ceilings._is_exceeded", lambda *_: False)
    for age_s, again in ((3500, False), (3700, True)):
        calls.clear()
        os.utime(measured.cache_path, (time.time() - age_s, time.time() - age_s))
        assert with_ceilings(unsteady) and bool(calls) is again
    os.utime(measured.cache_path, (0, 0))
    calls.clear()
    monkeypatch.setattr("redline.machine.ceilings.current_load", lambda: Load(1e3))
    assert with_ceilings(unsteady) is unsteady and not calls


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99"])
def test_unknown_devices_are_one_sentence(device: str) -> None:
    with pytest.raises(MachineError):
        resolve_device(device)


def test_measuring_again_lowers_no_ceiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the fp32 ceiling was too low; the new values of the others are low because the machine is busy."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    monkeypatch.setattr("redline.machine.ceilings.current_load", lambda: Load(0.0))
    known = Ceilings(1e9, {"fp32": 1.0, "bf16": 9e9}, {"fp32": 2e9, "bf16": 3e9})
    now = Ceilings(2e9, {"fp32": 5e9, "bf16": 1e6}, {"fp32": 1e9, "bf16": 4e9})
    monkeypatch.setattr("redline.machine.ceilings.measure_ceilings", lambda _: now)
    found = with_ceilings(replace(CPU, ceilings=known)).ceilings
    assert found == Ceilings(2e9, {"fp32": 5e9, "bf16": 9e9}, {"fp32": 2e9, "bf16": 4e9})
    assert with_ceilings(replace(CPU, ceilings=known), again=True).ceilings == now
