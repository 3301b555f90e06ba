"""Which dtype and plan a model gets, by machine and wish."""

from dataclasses import replace

import pytest
import torch

from redline.errors import RedlineError
from redline.generation.planned import choose_load_options
from redline.ladder.plan import Plan
from redline.machine.machine import Machine

pytestmark = pytest.mark.cpu

CPU = Machine.detect("cpu")
HALF = ("fp32", "bf16", "fp16")
GPU = replace(CPU, device="cuda", name="a GPU", capability=(9, 0), hardware_dtypes=HALF, ceilings=None)


def test_automatic() -> None:
    assert choose_load_options(CPU).dtype == torch.float32 and str(choose_load_options(CPU).plan) == "eager"
    assert choose_load_options(GPU).dtype == torch.bfloat16 and str(choose_load_options(GPU).plan) == "fused_ops"


def test_by_name() -> None:
    assert choose_load_options(GPU, "fp16").dtype == torch.float16
    assert choose_load_options(GPU, "fp32").dtype == torch.float32
    assert str(choose_load_options(GPU, "int8").plan) == "fused_ops + int8"
    assert str(choose_load_options(GPU, "fp8").plan) == "fused_ops + fp8(mode=weight_only)"
    with pytest.raises(RedlineError, match="unknown precision 'fp4'"):
        choose_load_options(CPU, "fp4")
    with pytest.raises(RedlineError, match="fp8 cannot run here"):
        choose_load_options(CPU, "fp8")


def test_a_plan_that_converts_gets_weights_to_convert() -> None:
    assert choose_load_options(GPU, plan=Plan.parse("bf16 + compile")).dtype == torch.float32
    assert choose_load_options(GPU, plan=Plan.parse("compile")).dtype == torch.bfloat16
    with pytest.raises(RedlineError, match="the plan sets the precision"):
        choose_load_options(GPU, "bf16", Plan.parse("compile"))
