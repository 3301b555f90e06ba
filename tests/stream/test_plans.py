"""The resolved plan is reported, and fp32 is strict despite torch's default."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.stream.frame_model import apply_plan
from redline.stream.lsd_frames import LsdFrames
from stream.small_models import SMALL, small_lsd

# Some releases of torch warn about the older switches, which these tests have to set.
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:Please use the new API settings")]
BACKENDS: Any = torch.backends
SWITCHES = [("generic", "all"), *(("cuda", op) for op in ("all", "matmul", "conv", "rnn"))]
CPU = torch.device("cpu")


def switches() -> list[Any]:
    new = [torch._C._get_fp32_precision_getter(*switch) for switch in SWITCHES]
    return [*new, BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32]


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    before = switches()
    yield
    BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32 = before[-2:]
    for switch, value in zip(SWITCHES, before, strict=False):
        torch._C._set_fp32_precision_setter(*switch, value)


class Watching(nn.Module):
    """Records whether TF32 is allowed while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)
        self.seen: list[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(switches())
        return self.layer(x)


def test_a_plan_without_a_precision_runs_in_fp32() -> None:
    BACKENDS.cudnn.allow_tf32 = True
    network, sample = Watching(), torch.rand(1, 3, 8, 9)
    plan, applied = apply_plan(Plan.parse("channels_last"), network, CPU, (sample,))
    applied(sample)
    assert str(plan) == "channels_last" and network.seen[-1][-2:] == [False, False]
    assert BACKENDS.cudnn.allow_tf32


def test_a_plan_with_a_precision_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "why_slow", lambda *_: "")
    BACKENDS.cudnn.allow_tf32 = True
    network, sample = Watching(), torch.rand(1, 3, 8, 9)
    _, applied = apply_plan(Plan.parse("bf16"), network, CPU, (sample,))
    applied(sample)
    assert network.seen[-1][-1] is True


def test_fp16_that_fell_back_is_reported_to_be_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "why_slow", lambda *_: "")
    model = small_lsd()
    with torch.no_grad():
        model.stem.weight[0, 0, 0, 0] = 1e5
    with pytest.warns(UserWarning, match="fp16 falls back to bf16"):
        frames = LsdFrames(model, Plan.parse("fp16 + channels_last"), "cpu")
    assert str(frames.plan) == "bf16 + channels_last"
    assert {weight.dtype for weight in frames.network.parameters()} == {torch.bfloat16}


@pytest.mark.gpu
def test_on_a_gpu_fp32_is_fp32_and_tf32_is_not() -> None:
    gpu = torch.device("cuda")
    # Wide enough for the kernels that round.
    wide = replace(SMALL, width=64)
    BACKENDS.cudnn.allow_tf32 = True
    pictures = torch.rand(3, 1, 3, 64, 64) * 2 - 1
    times = torch.tensor([500])
    with torch.no_grad():
        exact = small_lsd(config=wide).double()(*pictures.double(), times)

    def error(plan: str) -> float:
        frames = LsdFrames(small_lsd(config=wide), Plan.parse(plan), gpu)
        with torch.inference_mode():
            made = frames.network(*pictures.to(gpu), times.to(gpu), None)
        return float((made.double().cpu() - exact).abs().max() / exact.abs().max())

    assert error("") < 2e-5 and error("channels_last") < 2e-5
    assert error("tf32") > 5 * error("")
