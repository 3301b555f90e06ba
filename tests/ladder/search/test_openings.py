"""The openings: whole plans for this machine, without the rungs that it or the settings exclude."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from redline.ladder.search.openings import openings
from redline.ladder.search.settings import Settings, read_rungs
from redline.machine.machine import Ceilings, Machine

# The extras install OpenVINO on x86 only.
ENGINES = [name for name in ("onnxruntime", "openvino") if importlib.util.find_spec(name) is not None]
CPU = replace(Machine.detect("cpu"), ceilings=None, hardware_dtypes=("fp32",))
GPU = replace(
    CPU,
    device="cuda:0",
    name="NVIDIA H200",
    capability=(9, 0),
    hardware_dtypes=("fp32", "fp16", "bf16", "tf32"),
    versions={**CPU.versions, "triton": "3"},
)


def opened(machine: Machine, training: bool = False, **asked: tuple[str, ...]) -> list[str]:
    settings = Settings("resnet", device="cpu", **{name: read_rungs(texts) for name, texts in asked.items()})
    return [str(plan) for plan in openings(settings, machine, training)]


def test_on_a_gpu_half_precision_is_compiled_in_both_layouts() -> None:
    graphs = "compile(mode=reduce-overhead)"
    layouts = ("bf16", "fp16", "bf16 + channels_last", "fp16 + channels_last")
    assert opened(GPU) == [f"{layout} + {graphs}" for layout in layouts]
    assert opened(GPU, without=("channels_last",)) == [f"bf16 + {graphs}", f"fp16 + {graphs}"]
    assert opened(GPU, only=("compile", "fp16")) == [graphs, f"fp16 + {graphs}"]
    assert opened(GPU, only=("bf16", "fp16")) == [] == opened(GPU, without=("compile(mode=reduce-overhead)",))
    assert all("compile" in plan and "fused_optimizer" in plan for plan in opened(GPU, training=True))


def test_on_a_cpu_the_fastest_dtype_of_the_hardware_is_compiled() -> None:
    def with_bf16(times: float) -> Machine:
        rates = {"fp32": 1.0, "bf16": times}
        return replace(CPU, hardware_dtypes=("fp32", "bf16"), ceilings=Ceilings(1.0, rates, rates))

    assert opened(CPU) == [*ENGINES, "compile(freeze=true)"]
    assert opened(with_bf16(3.0)) == [*ENGINES, "bf16 + compile(freeze=true)"]
    assert opened(with_bf16(0.5)) == [*ENGINES, "compile(freeze=true)"]
    assert opened(with_bf16(3.0), training=True) == ["fused_optimizer + bf16 + compile"]
    assert opened(CPU, only=("compile(dynamic=true)",)) == []


@pytest.mark.usefixtures("without_compiler")
def test_an_engine_that_cannot_run_here_opens_nothing() -> None:
    assert opened(CPU) == [*ENGINES]


def test_every_opening_parses_and_has_an_engine(monkeypatch: Any) -> None:
    for machine in (CPU, GPU):
        for training in (False, True):
            assert opened(machine, training)
