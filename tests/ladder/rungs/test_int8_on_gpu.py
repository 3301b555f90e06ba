"""int8 on a GPU."""

import pytest
import torch
from torch import nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.int8 import Int8
from redline.machine.machine import Machine

pytestmark = pytest.mark.gpu
MODES = ("weight_only", "dynamic", "static")


@pytest.mark.parametrize("mode", MODES)
def test_output_is_close_and_the_proof_counts(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 130), nn.Linear(130, 64)).cuda().eval()
    x = torch.randn(48, 128, device="cuda")
    rung = Int8(mode=mode)
    plan, job = Plan((rung,)).build(Job.of(model, samples=(x,)), Machine.detect("cuda"))
    # 130 is no multiple of 8: cuBLAS would send two of the products to the CPU.
    assert rung.proof(job).startswith(f"{3 if mode == 'weight_only' else 1} of 3 linear layers")
    fresh = torch.randn(48, 128, device="cuda")
    assert relative_error([model(fresh)], [job.finish()(fresh)]) < 0.03


def test_layers_with_few_rows_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Unflatten(1, (4, 16)), nn.Linear(16, 16)).cuda()
    job = Job.of(model, samples=(torch.randn(8, 64, device="cuda"),))
    assert Int8(mode="dynamic", min_features=8).resolve(job) == Int8(mode="dynamic", min_features=8, skip=("0",))


@pytest.mark.parametrize("mode", MODES)
def test_under_the_compiler(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().eval()
    x = torch.randn(64, 128, device="cuda")
    plan = Plan.parse(f"bf16 + int8(mode={mode})")
    job = plan.build(Job.of(model, samples=(x,)), Machine.detect("cuda"))[1]
    with torch.no_grad():
        assert relative_error([model(x)], [torch.compile(job.model)(x)]) < 0.03
