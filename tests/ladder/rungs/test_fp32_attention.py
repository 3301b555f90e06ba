import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.fp32_attention import Fp32Attention
from redline.machine.machine import Machine
from tiny_attention import WIDTH, Biased, Causal, Einsum, Fused, Masked, Plain, Projected, Stack, Unbound

pytestmark = pytest.mark.cpu

FAST = replace(Machine.detect("cpu"), hardware_dtypes=("fp32", "fp16", "bf16"), ceilings=None)
N = 5


def inputs(seed: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, N, WIDTH, generator=torch.Generator().manual_seed(seed))


def in_low(model: nn.Module, dtype: str = "fp16", **more: Any) -> Job:
    """As the fp16 and bf16 rungs leave a job, without their own checks."""
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]

    class Low(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner.to(low)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to(low)).float()

    job = Job.of(model, (inputs(0),), **more)
    return replace(job, model=Low(job.model), precision=dtype)


def with_large_scores(model: Projected) -> Projected:
    """Scores beyond fp16's 65,504, from queries and keys and values that are well inside of it."""
    with torch.no_grad():
        model.qkv.weight.mul_(2)
        model.qkv.weight[: 2 * WIDTH].mul_(200)
    return model


def rounded_reference(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """In fp64, from weights and inputs rounded to the dtype, queries, keys and values rounded too."""
    twin = copy.deepcopy(model).to(dtype).double()
    twin.qkv.register_forward_hook(lambda module, args, output: output.to(dtype).double())
    return twin(x.to(dtype).double())


@pytest.mark.parametrize("form", [Plain, Unbound, Einsum, Causal, Masked, Fused])
def test_fp32_scores_do_not_overflow(form: Any) -> None:
    torch.manual_seed(0)
    model = with_large_scores(form().eval())
    x = inputs(1)
    scores = [t @ u.mT for t, u, _ in [model.split(x)]][0]
    assert scores.abs().max() > 65_504

    plain = in_low(model).finish()(x)
    job = Fp32Attention().apply(in_low(model))
    output = job.finish()(x)
    if form is not Fused:
        assert not torch.isfinite(plain).all()
    # Only the output's own roundings are left: the projection's input, sum and result, at 2^-11.
    assert relative_error([rounded_reference(model, x, torch.float16)], [output]) < 3 * 2**-11
    assert "fp32 scores in 1 attention module" in Fp32Attention().proof(job)


def test_bf16_error_decreases() -> None:
    torch.manual_seed(0)
    model = Plain().eval()
    with torch.no_grad():
        model.qkv.weight[: 2 * WIDTH].mul_(6)
    x = inputs(1)
    expected = rounded_reference(model, x, torch.bfloat16)
    plain = relative_error([expected], [in_low(model, "bf16").finish()(x)])
    lifted = relative_error([expected], [Fp32Attention().apply(in_low(model, "bf16")).finish()(x)])
    assert lifted < 3 * 2**-8
    assert lifted < 0.8 * plain


def test_after_sdpa_rewrote_the_same_modules() -> None:
    torch.manual_seed(0)
    model = with_large_scores(Plain().eval())
    job = Job.of(model, (inputs(0),))
    job = Plan.parse("sdpa").build(job, FAST)[1]
    inner = job.model.half()
    job = replace(job, model=nn.Sequential(Half(), inner), precision="fp16")
    job = Fp32Attention().apply(job)
    x = inputs(1)
    assert relative_error([rounded_reference(model, x, torch.float16)], [job.finish()(x).float()]) < 3 * 2**-11


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half()


def test_training_gives_finite_gradients_where_fp16_does_not() -> None:
    torch.manual_seed(0)
    model = with_large_scores(Plain())
    more = {"loss": lambda y, b: y.mean(), "optimizer": lambda ps: torch.optim.SGD(ps, lr=1e-4)}
    plain = in_low(model, **more).finish()
    plain(inputs(0))
    assert not all(g.isfinite().all() for g in plain.gradients().values())
    job = Fp32Attention().apply(in_low(model, **more))
    step = job.finish()
    step(inputs(0))
    assert step.gradients().keys() == job.parameters.keys()
    assert all(g.isfinite().all() for g in step.gradients().values())


def test_training_with_dropout_is_proven_too() -> None:
    torch.manual_seed(0)
    more = {"loss": lambda y, b: y.mean(), "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.0)}
    for job in (in_low(Unbound().train(), **more), in_low(Stack(Biased(N), Unbound()).train(), **more)):
        job = Fp32Attention().apply(job)
        assert not job.evidence["fp32_attention"].left


def test_the_users_model_is_left_alone() -> None:
    model = Stack(Plain(), Fused()).eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    before = model(inputs(1))
    Fp32Attention().apply(in_low(model)).finish()(inputs(1))
    assert [type(b) for b in model.blocks] == [Plain, Fused]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    assert torch.equal(model(inputs(1)), before)


def test_reasons_why_not() -> None:
    rung = Fp32Attention()
    assert rung.why_not(FAST) == ""
    assert "fp32" in rung.why_not(FAST, Job.of(Plain(), (inputs(0),)))
    assert "needs sample inputs" in rung.why_not(FAST, replace(Job.of(Plain()), precision="fp16"))
    no_attention = replace(Job.of(nn.Linear(WIDTH, 2), (inputs(0),)), precision="fp16")
    assert "no attention" in rung.why_not(FAST, no_attention)
    with pytest.raises(Unavailable, match="fp32"):
        Plan.parse("fp32_attention").build(Job.of(Plain(), (inputs(0),)), FAST)


def test_attention_that_cannot_be_rewritten_is_refused_by_name() -> None:
    class Branches(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            q = q * 2 if x.sum() > 0 else q
            return self.join((q @ k.mT).softmax(-1) @ v)

    with pytest.raises(RungError, match="inner .*control flow depends on data"):
        Fp32Attention().apply(in_low(Branches().eval()))


def test_plan_round_trip() -> None:
    plan = Plan.parse("fp16 + fp32_attention")
    assert Plan.parse(str(plan)) == plan


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["fp32_attention", "fp32_attention + compile"])
def test_on_cuda(plan: str) -> None:
    torch.manual_seed(0)
    model = with_large_scores(Plain().eval())
    x = inputs(1)
    expected = rounded_reference(model, x, torch.float16)
    job = in_low(model)
    job = replace(job, model=job.model.cuda(), samples=(inputs(0).cuda(),))
    _, job = Plan.parse(plan).build(job, Machine.detect("cuda"))
    # A fused kernel keeps its scores in registers, so that only the fp16 roundings outside of it are left.
    assert relative_error([expected], [job.finish()(x.cuda()).cpu()]) < 3 * 2**-11
