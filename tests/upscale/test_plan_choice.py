"""Which plan images are enlarged under."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.ladder.plans.choose import bundled, choose_plan
from redline.machine.gpu_classes import gpu_class
from redline.machine.machine import Machine
from redline.models.drct import Drct, DrctConfig
from redline.upscale.network import Network
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import Cut, Tiling

pytestmark = pytest.mark.cpu

DTYPES = ("fp32", "fp16", "bf16", "int8")
CPU = replace(Machine.detect("cpu"), hardware_dtypes=DTYPES, ceilings=None)
VERSIONS = {"torch": "2.11", "torchao": "0.14", "triton": "3"}
GPU = replace(CPU, device="cuda:0", name="a GPU", capability=(9, 0), hardware_dtypes=DTYPES, versions=VERSIONS)

NETWORK = Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4))


def choose(machine: Machine, model: nn.Module, precision: str = "auto") -> Plan:
    return choose_plan("upscale", machine, precision, model=model).plan


def test_what_another_network_has_no_use_for_is_left_out() -> None:
    assert str(choose(GPU, nn.Conv2d(3, 3, 1))) == "fp16 + cuda_graph"
    chosen = choose_plan("upscale", GPU, model=nn.Conv2d(3, 3, 1))
    assert list(chosen.left_out) == ["fused_ops"]
    assert str(chosen) == f"fp16 + cuda_graph (without fused_ops: {chosen.left_out['fused_ops']})"


def test_a_gpu_of_another_class_says_that_its_plan_was_not_measured(tmp_path: Path) -> None:
    ada = replace(GPU, capability=(8, 9))
    chosen = choose_plan("upscale", ada, model=NETWORK)
    assert chosen.plan == choose(GPU, NETWORK) and not choose_plan("upscale", GPU, model=NETWORK).unmeasured
    assert str(chosen).startswith("fused_ops + fp16 + cuda_graph (not measured on compute capability 8.9, but on 9.0 (")
    assert not choose_plan("upscale", CPU, model=NETWORK).unmeasured
    for capability, name in (((7, 5), "sm80"), ((8, 6), "sm86"), ((8, 7), "sm86"), ((9, 0), "sm90"), ((12, 0), "sm90")):
        assert gpu_class(capability).name == name
    (tmp_path / "upscale-sm86.toml").touch()
    assert bundled("upscale", replace(GPU, capability=(8, 6)), tmp_path).name == "upscale-sm86.toml"
    assert bundled("upscale", ada, tmp_path).name == "upscale-cuda.toml"


def test_a_precision_takes_the_place_of_the_shipped_one() -> None:
    assert str(choose(GPU, NETWORK)) == "fused_ops + fp16 + cuda_graph"
    assert str(choose(GPU, NETWORK, "bf16")) == "fused_ops + bf16 + cuda_graph"
    assert str(choose(GPU, NETWORK, "fp32")) == "fused_ops + cuda_graph"


def test_int8_needs_layers_that_it_knows() -> None:
    """Those that are packed for a GPU it does not know, those for a CPU it does."""
    assert Plan.parse("fused_ops(pack=false)").rungs[0] == choose(GPU, NETWORK, "int8").rungs[0]
    assert Plan.parse("fused_ops").rungs[0] == choose(CPU, NETWORK, "int8").rungs[0]


def test_what_cannot_run_is_said() -> None:
    with pytest.raises(RedlineError, match="precision fp16 cannot run here: .* has no hardware support for fp16"):
        choose(replace(CPU, hardware_dtypes=("fp32",)), NETWORK, "fp16")


@pytest.mark.parametrize(("plan", "expected"), [("", "ieee"), ("channels_last", "ieee"), ("tf32", "tf32")])
def test_fp32_is_strict_unless_the_plan_allows_tf32(plan: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Doubling(nn.Conv2d):
        """Repeats every pixel, and notes whether convolutions may round to TF32 meanwhile."""

        def forward(self, input: Tensor) -> Tensor:
            seen.append(convolution_precision())
            return super().forward(input).repeat_interleave(2, -1).repeat_interleave(2, -2)

    detect = Machine.detect
    monkeypatch.setattr(Machine, "detect", lambda device: replace(detect(device), hardware_dtypes=("fp32", "tf32")))
    network = Network(Doubling(3, 3, 1), 2, 4, "doubling", "digest")
    before = convolution_precision()
    using = TileRunner(network, Plan.parse(plan), "cpu", Tiling.square(Cut(32, 4, 4, 4)), 1)
    using(torch.rand(1, 3, 32, 32))
    assert seen == [expected]
    assert convolution_precision() == before


def convolution_precision() -> str:
    return torch._C._get_fp32_precision_getter("cuda", "conv")
