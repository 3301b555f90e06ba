"""fused_ops: every module that has a kernel of its own takes it, the output stays, the user's model too."""

import copy

import pytest
import torch
from torch import nn

from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.fused_ops import FusedOps
from redline.ladder.rungs.tf32 import strict_fp32
from redline.ladder.workloads.drct import draw
from redline.machine.machine import Machine
from redline.models.drct import Drct, DrctConfig
from redline.nn import WindowAttention

CONFIG = DrctConfig.of(2, 2, width=24, growth=8, features=8, window=4)


def test_modules_switch_to_fused_kernels_with_equal_output() -> None:
    model = draw(Drct(CONFIG)).eval()
    picture = torch.rand(2, 3, 12, 20)
    fast = Plan.parse("fused_ops").apply(model, samples=picture)
    with torch.no_grad():
        torch.testing.assert_close(fast(picture), model(picture), atol=1e-5, rtol=1e-5)
    assert FusedOps().proof(fast.job) == "1 Drct by sdpa"
    modules = [m for m in model.modules() if isinstance(m, WindowAttention)]
    assert len(modules) == 10 and all(m.implementation == "reference" for m in modules)


def test_training_learns_the_same() -> None:
    torch.manual_seed(0)
    model = draw(Drct(CONFIG))
    other = copy.deepcopy(model)
    picture = torch.rand(1, 3, 8, 12)
    target = torch.rand(1, 3, 16, 24)
    step = Plan.parse("fused_ops").apply(
        other,
        samples=picture,
        loss=lambda output, _batch: (output - target).abs().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    loss = step(picture)
    expected = (model(picture) - target).abs().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    found = step.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3)


def test_model_without_switchable_modules_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no module with a fused implementation"):
        Plan.parse("fused_ops").apply(nn.Linear(3, 3), samples=torch.rand(2, 3))
    assert FusedOps().why_not(Machine.detect("cpu")) == ""


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_triton_kernel() -> None:
    model = draw(Drct(CONFIG)).eval().cuda()
    picture = torch.rand(2, 3, 12, 20, device="cuda")
    for pack in ("true", "false"):
        for precision, tolerance in (("", 1e-4), (" + bf16", 0.1)):
            fast = Plan.parse(f"fused_ops(pack={pack}){precision}").apply(model, samples=picture)
            with torch.no_grad(), strict_fp32():
                torch.testing.assert_close(fast(picture), model(picture), atol=tolerance, rtol=tolerance)
            proof = "1 Drct by triton" if pack == "true" else "1 Drct by reference, 10 WindowAttention by triton"
            assert FusedOps().proof(fast.job) == proof + ("" if precision else "; no TF32")


@pytest.mark.gpu
@pytest.mark.parametrize("pack", ["true", "false"])
def test_fp32_on_a_gpu_is_strict_unless_the_plan_allows_tf32(pack: str) -> None:
    # Wide enough for cuDNN's kernels that round to TF32.
    model = draw(Drct(DrctConfig.of(2, 1, width=64, growth=16, features=64))).eval()
    picture = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(picture.double())
    model, picture = model.cuda(), picture.cuda()

    def error(plan: str) -> float:
        made = Plan.parse(plan).apply(model, samples=picture)(picture)
        return float((made.double().cpu() - exact).norm() / exact.norm())

    assert error(f"fused_ops(pack={pack})") < 5e-6
    assert error(f"fused_ops(pack={pack}) + cuda_graph") < 5e-6
    assert error(f"fused_ops(pack={pack}) + tf32") > 1e-4
    assert torch.backends.cudnn.allow_tf32
