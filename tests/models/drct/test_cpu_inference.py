"""Groups whose rows stand window by window give what the plain ones give, and stay made of plain layers."""

import copy

import pytest
import torch
from torch import nn

from redline.errors import ModelError
from redline.ladder.gate import Gate
from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.fused_ops import FusedOps
from redline.ladder.workloads.drct import draw, smooth_images
from redline.models.drct import Drct, DrctConfig
from redline.models.drct.cpu_inference import WindowedBlock

USUAL = DrctConfig.of(2, 1, window=4, features=8)
ODD = DrctConfig.of(3, 2, width=20, growth=6, features=8, window=4)


@pytest.mark.parametrize("config", [USUAL, ODD], ids=["180 channels", "20 channels"])
@torch.no_grad()
def test_output_equals_that_of_the_original_groups(config: DrctConfig) -> None:
    model = draw(Drct(config)).eval().double()
    for parameter in model.parameters():  # norms and biases far from one and zero
        parameter.add_(0.1 * torch.randn_like(parameter))
    other = copy.deepcopy(model)
    other.pack(torch.device("cpu"))
    for shape in ((2, 3, 8, 12), (1, 3, 4, 4), (1, 3, 16, 4)):
        picture = torch.rand(shape).double()
        torch.testing.assert_close(other(picture), model(picture), atol=1e-9, rtol=1e-9)


def test_is_packed_once() -> None:
    model = Drct(ODD)
    model.pack(torch.device("cpu"))
    with pytest.raises(ModelError, match="packed already"):
        model.pack(torch.device("cpu"))


def test_heads_are_filled_up_and_the_layers_stay_layers() -> None:
    model = Drct(ODD)
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    model.pack(torch.device("cpu"))
    blocks = [module for module in model.modules() if isinstance(module, WindowedBlock)]
    assert len(blocks) == 10
    for block, heads in zip(blocks, 2 * ODD.heads, strict=True):
        assert block.qkv.out_features == 3 * block.proj.in_features and block.proj.in_features % (16 * heads) == 0
    # fc2 is gone; its product with the 1×1 convolution stands in its place.
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == linear
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.parametrize(
    "text", ["fused_ops", "fused_ops + bf16", "fused_ops + int8", "fused_ops + int8(mode=dynamic)"]
)
def test_fused_ops_uses_it_on_a_cpu(text: str) -> None:
    torch.manual_seed(0)
    model = draw(Drct(USUAL)).eval()
    picture = smooth_images(1, 8)
    # Applied one by one, wherever they would be slow.
    job = Job.of(copy.deepcopy(model))
    for rung in Plan.parse(text).rungs:
        job = rung.apply(job)
    fast = job.finish()
    with torch.no_grad():
        assert Gate("psnr", 30.0 if "int8" in text else 44.0).judge(model(picture), fast(picture)).passed
    assert FusedOps().proof(fast.job) == "1 Drct by sdpa"
    assert any(isinstance(module, WindowedBlock) for module in fast.job.model.modules())
    assert not any(isinstance(module, WindowedBlock) for module in model.modules())
