import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rewrites.attention import observe
from redline.ladder.rewrites.attention_rewrite import fuse
from redline.ladder.rungs.sdpa import Sdpa
from redline.ladder.workload import call
from redline.machine.machine import Machine
from tiny_attention import (
    WIDTH,
    Added,
    Biased,
    Causal,
    Divided,
    Einsum,
    EinsumSequenceFirst,
    Folded,
    Fused,
    Masked,
    OneKeyHead,
    Plain,
    Projected,
    Stack,
    Transposed,
    Unbound,
)

CPU = Machine.detect("cpu")
N = 7


def inputs(seed: int, batch: int = 2, length: int = N, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def mask(seed: int) -> Tensor:
    keep = torch.rand(2, N, generator=torch.Generator().manual_seed(seed)) > 0.4
    keep[:, 0] = True
    return keep


def fp64(model: nn.Module, sample: Any) -> Tensor:
    """The user's own code in double precision."""

    def double(t: Any) -> Any:
        return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t

    sample = tuple(map(double, sample)) if isinstance(sample, tuple) else double(sample)
    return call(copy.deepcopy(model).double(), sample)


def applied(model: nn.Module, sample: Any, plan: str = "sdpa") -> tuple[Plan, Job]:
    return Plan.parse(plan).build(Job.of(model, (sample,)), CPU)


FORMS: dict[str, tuple[Any, Any]] = {
    "plain": (Plain, inputs),
    "unbound": (Unbound, inputs),
    "divided": (Divided, inputs),
    "folded": (Folded, inputs),
    "einsum": (Einsum, inputs),
    "einsum, sequence first": (EinsumSequenceFirst, inputs),
    "biased": (lambda: Biased(N), inputs),
    "causal": (Causal, inputs),
    "causal, finite fill": (lambda: Causal(fill=-1e9), inputs),
    "no mask given": (Masked, inputs),
    "masked": (Masked, lambda s: (inputs(s), mask(s))),
    "masked, finite fill": (lambda: Masked(-1e9), lambda s: (inputs(s), mask(s).float())),
    "added": (Added, lambda s: (inputs(s), inputs(s, 3, N, N), mask(s)[:, None, None, :])),
    "transposed": (Transposed, lambda s: inputs(s, 2, 6, N)),
    "one key head": (OneKeyHead, inputs),
}


@pytest.mark.parametrize("form", FORMS)
def test_handwritten_attention_becomes_fused_and_stays_equal(form: str) -> None:
    build, sample = FORMS[form]
    torch.manual_seed(0)
    model = build().eval()
    plan, job = applied(model, sample(0))
    run = job.finish()
    assert isinstance(job.evidence["sdpa"][1].done, list)
    assert job.evidence["sdpa"][1].done == ["the model itself"]
    for seed in (1, 2):
        assert relative_error([fp64(model, sample(seed))], [call(run, sample(seed))]) < 1e-5
    assert "1 attention module rewritten" in plan.rungs[0].proof(job)


@pytest.mark.parametrize("form", [Plain, Unbound, Folded, EinsumSequenceFirst, Causal])
@pytest.mark.parametrize("batch,length", [(1, 1), (3, 5), (5, 11)])
def test_other_shapes_than_the_sample(form: Any, batch: int, length: int) -> None:
    torch.manual_seed(0)
    model = form().eval()
    run = applied(model, inputs(0))[1].finish()
    x = inputs(3, batch, length)
    assert relative_error([fp64(model, x)], [run(x)]) < 1e-5


def test_a_buffer_that_is_causal_becomes_the_causal_flag() -> None:
    model = Causal().eval()
    _, job = applied(model, inputs(0))
    (seen,) = job.evidence["sdpa"][0]
    assert seen.causal and seen.mask is None


def test_a_buffer_that_is_not_causal_stays_a_mask() -> None:
    model = Causal().eval()
    model.mask[..., 5, 2] = 0
    _, job = applied(model, inputs(0))
    (seen,) = job.evidence["sdpa"][0]
    assert not seen.causal and seen.boolean_mask
    x = inputs(1)
    assert relative_error([fp64(model, x)], [job.finish()(x)]) < 1e-5


def test_fully_masked_rows_have_uniform_weights_with_a_finite_fill() -> None:
    torch.manual_seed(0)
    model = Masked(-1e9).eval()
    run = applied(model, (inputs(0), mask(0)))[1].finish()
    nowhere = torch.zeros(2, N, dtype=torch.bool)
    assert relative_error([fp64(model, (inputs(1), nowhere))], [run(inputs(1), nowhere)]) < 1e-5


def test_unproven_calls_use_the_original_forward() -> None:
    torch.manual_seed(0)
    model = Masked().eval()
    run = applied(model, inputs(0))[1].finish()
    x, keep = inputs(1), mask(1)
    for given in ((x, keep), (x,), (x, None)):
        assert relative_error([fp64(model, given)], [run(*given)]) < 1e-5
    assert relative_error([fp64(model, (x, keep))], [run(x, mask=keep)]) < 1e-5
    assert relative_error([fp64(model, x)], [run(x=x)]) < 1e-5


class ReturnsWeights(Projected):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.join(weights @ v), weights


class Branches(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if x.sum() > 0:
            q = q * 2
        return self.join((q @ k.transpose(-2, -1)).softmax(-1) @ v)


class OverQueries(Projected):
    """Looks like attention, and is not: the softmax runs over the wrong axis."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-2, -1)).softmax(-2) @ v)


class MaskedThenScaled(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = (q @ k.transpose(-2, -1)).masked_fill(x[:, None, :, :1] > 0, -1e9) * 1e-9
        return self.join(scores.softmax(-1) @ v)


class WeakFill(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-2, -1)).masked_fill(x[:, None, :, :1] > 0, -10.0).softmax(-1) @ v)


class Cubed(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(((q @ k.transpose(-2, -1)) ** 3).softmax(-1) @ v)


@pytest.mark.parametrize(
    "form,reason",
    [
        (ReturnsWeights, "weights are used elsewhere"),
        (Branches, "control flow depends on data"),
        (OverQueries, "equality is not proven"),
        (MaskedThenScaled, "scaled after masking"),
        (WeakFill, "filled with -10"),
        (Cubed, "not over a product"),
    ],
)
def test_unproven_modules_stay_unchanged_and_are_named(form: Any, reason: str) -> None:
    torch.manual_seed(0)
    model = form().eval()
    job = Job.of(model, (inputs(0),))
    job = Sdpa(backend="default").apply(job)
    left = job.evidence["sdpa"][1].left
    assert len(left) == 1 and reason in left[0][1]
    assert Sdpa(backend="default").proof(job) == ""
    seen, expected = job.model(inputs(1)), model(inputs(1))
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_proof_names_what_was_rewritten_and_what_was_left() -> None:
    torch.manual_seed(0)
    plan, job = applied(Stack(Plain(), Branches(), Unbound()).eval(), inputs(0))
    proof = plan.rungs[0].proof(job)
    assert "2 attention modules rewritten (blocks.0, blocks.2)" in proof
    assert "1 unchanged: blocks.1 (it cannot be traced: its control flow depends on data)" in proof
    assert "2 calls with the flash kernel in fp32" in proof


def test_blocks_of_one_kind_share_a_class_so_that_compilers_compile_once() -> None:
    _, job = applied(Stack(*(Plain() for _ in range(3))).eval(), inputs(0))
    assert len({type(block) for block in job.model.blocks}) == 1
    assert type(job.model.blocks[0]) is not Plain
    assert isinstance(job.model.blocks[0], Plain)


@pytest.mark.parametrize("form", [Plain, Unbound, Divided, lambda: Biased(N), Causal])
def test_training_gives_the_same_gradients(form: Any) -> None:
    torch.manual_seed(0)
    model = form().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if isinstance(model, Divided):
        model.eval()  # its dropout is in its code

    def build(m: nn.Module) -> Job:
        return Job.of(
            m,
            (inputs(0),),
            loss=lambda y, batch: (y**2).mean(),
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        )

    eager = build(model)
    named = dict(eager.parameters)
    plain, job = eager.finish(), Plan.parse("sdpa").build(build(model), CPU)[1]
    assert job.evidence["sdpa"][1].done
    fast = job.finish()
    for seed in range(3):
        assert float(fast(inputs(seed))) == pytest.approx(float(plain(inputs(seed))), rel=1e-5)
    expected, seen = plain.gradients(), fast.gradients()
    assert expected.keys() == seen.keys() == named.keys()
    assert relative_error(list(expected.values()), list(seen.values())) < 1e-4
    assert all(p is q for p, q in zip(job.parameters.values(), job.model.parameters(), strict=True))


def test_training_keeps_the_dropout_on_the_weights() -> None:
    torch.manual_seed(0)
    job = Job.of(
        Unbound().train(),
        (inputs(0),),
        loss=lambda y, b: (y**2).mean(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
    )
    _, job = Plan.parse("sdpa").build(job, CPU)
    assert job.evidence["sdpa"][1].done
    (seen,) = job.evidence["sdpa"][0]
    assert seen.dropout_p == 0.2
    step = job.finish()
    assert float(step(inputs(0))) != float(step(inputs(0)))


def test_the_users_model_and_torchs_settings_are_left_alone() -> None:
    model = Stack(Plain(), Causal()).eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    before, x = model(inputs(1)), inputs(1)
    order, flash = torch._C._get_sdp_priority_order(), torch._C._get_flash_sdp_enabled()
    random = torch.get_rng_state()
    for plan in ("sdpa", "sdpa(backend=flash)", "sdpa(backend=math)"):
        _, job = applied(model, inputs(0), plan)
        job.finish()(x)
        assert job.model.state_dict().keys() == state.keys()
    assert torch.equal(torch.get_rng_state(), random)
    assert torch._C._get_sdp_priority_order() == order and torch._C._get_flash_sdp_enabled() == flash
    assert [type(b) for b in model.blocks] == [Plain, Causal]
    assert all(torch.equal(model.state_dict()[name], t) for name, t in state.items())
    assert torch.equal(model(x), before)


def test_observing_leaves_running_means_and_random_state() -> None:
    model = nn.Sequential(nn.BatchNorm1d(N), Plain()).train()
    job = Job.of(model, (inputs(0),))
    random, mean = torch.get_rng_state(), model[0].running_mean.clone()
    seen = observe(job)
    assert list(seen.handwritten) == ["1"]
    assert torch.equal(job.model[0].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in job.model.modules())


def test_attention_that_is_fused_already_has_nothing_to_gain_on_a_cpu() -> None:
    job = Job.of(Fused().eval(), (inputs(0),))
    assert "already fused" in Sdpa().why_not(CPU, job)
    assert Sdpa(backend="math").why_not(CPU, job) == ""
    plan, done = applied(Fused().eval(), inputs(0), "sdpa(backend=math)")
    assert plan.rungs[0].proof(done) == "a forward pass makes 1 call with the math kernel in fp32"


def test_a_model_without_attention_says_so() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    for model in (nn.Linear(WIDTH, 4), Softmax()):
        assert "no attention" in Sdpa().why_not(CPU, Job.of(model, (inputs(0),)))


def test_a_kernel_that_is_not_there_says_so() -> None:
    assert "cudnn" in Sdpa(backend="cudnn").why_not(CPU)
    assert Sdpa(backend="cudnn").why_not(replace(CPU, attention_kernels=("cudnn",))) == ""


def test_without_samples_it_warns_and_leaves_handwritten_attention() -> None:
    model = Plain().eval()
    with pytest.warns(UserWarning, match="needs samples="):
        job = Sdpa(backend="default").apply(Job.of(model))
    assert type(job.model) is Plain
    assert Sdpa(backend="default").proof(job) == ""


def test_resolve_leaves_no_automatic_choice_and_no_change() -> None:
    job = Job.of(Plain().eval(), (inputs(0),))
    assert Sdpa().resolve(job).backend == "default"
    assert type(job.model) is Plain
    rewriting = fuse(job.model, observe(job), gradients=False)
    assert type(job.model) is not Plain
    rewriting.undo()
    assert type(job.model) is Plain


def test_plan_round_trip() -> None:
    plan = Plan((Sdpa(backend="flash", dtype="fp16"),))
    assert Plan.parse(str(plan)) == plan


def llama(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def built(model: nn.Module, tokens: dict[str, Tensor]) -> tuple[Sdpa, Job]:
    rung = Sdpa("default")
    return rung, rung.apply(Job.of(model, samples=(tokens,)))


def test_a_model_of_transformers_is_switched_and_proven() -> None:
    model, tokens = llama("eager"), {"input_ids": torch.randint(50, (2, 9))}
    rung, job = built(model, tokens)
    assert "1 attention module rewritten (the model itself)" in rung.proof(job) and "2 calls with the" in rung.proof(
        job
    )
    torch.testing.assert_close(job.model(**tokens).logits, model(**tokens).logits, atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == "eager", "the user's model is as it was"


def test_switch_is_reverted_if_outputs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = llama("eager"), {"input_ids": torch.randint(50, (2, 9))}
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: 1.01 * right(*a, **k))
    rung, job = built(model, tokens)
    assert rung.proof(job) == "" and job.model.config._attn_implementation == "eager"
    assert "the model itself (equality is not proven: relative error" in rung.why_no_proof(job)


def test_torchs_encoder_layers_say_why_there_is_nothing_to_switch() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True).eval()
    job = Job.of(layer, (inputs(0),))
    assert "uses its fast path" in Sdpa().why_not(CPU, job)
