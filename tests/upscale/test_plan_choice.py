"""Which plan pictures are enlarged under."""

from dataclasses import replace

import pytest
from torch import nn

from redline.errors import RedlineError
from redline.machine import Machine
from redline.models.drct import Drct, DrctConfig
from redline.plan import Plan
from redline.upscale.plans import choose_plan

CPU = replace(Machine.detect("cpu"), ceilings=None)
DTYPES = ("fp32", "fp16", "bf16", "int8")
VERSIONS = {"torch": "2.11", "torchao": "0.14", "triton": "3"}
GPU = replace(CPU, device="cuda:0", name="a GPU", capability=(9, 0), hardware_dtypes=DTYPES, versions=VERSIONS)

NETWORK = Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4))


def test_what_another_network_has_no_use_for_is_left_out() -> None:
    assert str(choose_plan(GPU, nn.Conv2d(3, 3, 1))) == "bf16 + cuda_graph"


def test_a_precision_takes_the_place_of_the_shipped_one() -> None:
    assert str(choose_plan(GPU, NETWORK)) == "fused_ops + bf16 + cuda_graph"
    assert str(choose_plan(GPU, NETWORK, "fp16")) == "fused_ops + fp16 + cuda_graph"
    assert str(choose_plan(GPU, NETWORK, "fp32")) == "fused_ops + cuda_graph"


def test_int8_needs_layers_that_it_knows() -> None:
    """Those that are packed for a GPU it does not know, those for a CPU it does."""
    assert Plan.parse("fused_ops(pack=false)").rungs[0] == choose_plan(GPU, NETWORK, "int8").rungs[0]
    assert Plan.parse("fused_ops").rungs[0] == choose_plan(CPU, NETWORK, "int8").rungs[0]


def test_what_cannot_run_is_said() -> None:
    with pytest.raises(RedlineError, match="fp16 cannot run here: .* has no hardware support for fp16"):
        choose_plan(replace(CPU, hardware_dtypes=("fp32",)), NETWORK, "fp16")
