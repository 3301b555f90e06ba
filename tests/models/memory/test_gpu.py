"""On a GPU: a whole text is read as the CPU reads it, by flex attention and by the memory's kernels, compiled too."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.models.memory import TitanConfig, TitanModel, windowed_attention
from redline.models.memory.token_positions import TokenPositions
from redline.training.determinism import deterministic

pytestmark = [
    pytest.mark.gpu,
    # The compiler warns of itself where it meets flex attention; that is none of this file's business.
    pytest.mark.filterwarnings("ignore"),
]
BANK = TitanConfig(
    vocabulary=211, width=64, layers=2, heads=4, key_value_heads=2, attention_every=2, segment=32, memory_slots=8
)
KINDS = {
    "bank": BANK,
    "window": replace(BANK, memory_slots=0, attention_every=1),
    "titans": replace(BANK, attention_every=0, memory_update="titans"),
}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(211, (2, 300))
    return tokens, tokens.roll(-1, 1), (torch.rand(2, 300) < 0.01).cumsum(1).int()


def gradients(model: TitanModel, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {name: one.double().cpu() for name, one in zip(names, found, strict=True) if one is not None}


@pytest.mark.parametrize(
    ("kind", "plan", "in_order"),
    [
        ("bank", "", False),
        ("bank", "", True),
        ("window", "", True),
        ("titans", "", True),
        ("bank", "compile(regional=true)", True),
        ("window", "checkpoint + compile(regional=true, fullgraph=true)", True),
    ],
)
def test_losses_and_gradients_follow_the_cpu(kind: str, plan: str, in_order: bool) -> None:
    exact = TitanModel(replace(KINDS[kind], layers=3))
    job = Job.of(copy.deepcopy(exact).cuda())
    for rung in Plan.parse(plan).rungs:
        job = rung.apply(job)
    model = job.model
    assert isinstance(model, TitanModel)
    tokens, targets, documents = batch()
    expected = exact.loss(tokens, targets, documents)
    with deterministic(in_order):
        loss = model.loss(tokens.cuda(), targets.cuda(), documents.cuda())
        found, wanted = gradients(model, loss), gradients(exact, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert found.keys() == wanted.keys()
    largest = max(one.norm() for one in wanted.values())
    for name, one in wanted.items():
        assert (found[name] - one).norm() <= 1e-3 * one.norm() + 1e-6 * largest, name


def test_a_bank_that_our_kernels_read_is_compiled_whole_and_as_exact() -> None:
    """Flex attention and its bias would need two graphs."""
    torch.manual_seed(0)
    exact = TitanModel(replace(BANK, width=256, layers=3))
    tokens, targets, documents = batch()
    wanted = gradients(exact, exact.loss(tokens, targets, documents))
    errors = []
    for plan in ("fused_ops", "fused_ops + checkpoint + compile(regional=true, fullgraph=true)"):
        job = Job.of(copy.deepcopy(exact).cuda().bfloat16())
        for rung in Plan.parse(plan).rungs:
            job = rung.apply(job)
        model = job.model
        assert isinstance(model, TitanModel)
        with deterministic(True):
            found = gradients(model, model.loss(tokens.cuda(), targets.cuda(), documents.cuda()))
        assert found.keys() == wanted.keys()
        off = torch.stack([(found[name] - one).norm() for name, one in wanted.items()]).norm()
        errors.append(float(off / torch.stack([one.norm() for one in wanted.values()]).norm()))
    assert errors[0] < 0.05 and errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("plan", ["", "fused_ops + compile(regional=true)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "width"), [("bank", 256), ("bank", 512), ("window", 256), ("titans", 256)])
def test_gradients_repeat_to_the_bit(kind: str, width: int, dtype: torch.dtype, plan: str) -> None:
    """A bank has a bias, the gradient of which many queries have a part in."""
    torch.manual_seed(0)
    job = Job.of(TitanModel(replace(KINDS[kind], width=width)).cuda().to(dtype))
    for rung in Plan.parse(plan).rungs:
        job = rung.apply(job)
    model = job.model
    assert isinstance(model, TitanModel)
    given = [one.repeat(4, 1).cuda() for one in batch()]
    with deterministic(True):
        first = gradients(model, model.loss(*given))
        for _ in range(20):
            again = gradients(model, model.loss(*given))
            assert [name for name, one in first.items() if not torch.equal(one, again[name])] == []


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_window_attention_kernels_match_the_reference(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TitanConfig(vocabulary=211, width=4 * head_dim, layers=1, heads=4, attention_every=1, segment=32)
    tokens, _, documents = batch()
    positions = TokenPositions.whole(tokens.cuda(), documents.cuda(), config)
    monkeypatch.setattr(windowed_attention, "flex_attention", None)
    query, key, value = (
        torch.randn(2, 300, heads, head_dim, device="cuda", dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    )
    found = windowed_attention.windowed_attention(query, key, value, positions, 32, 1, implementation="auto")
    exact = [one.detach().double().requires_grad_() for one in (query, key, value)]
    expected = windowed_attention.reference_attention(*exact, positions.positions_BS, positions.documents_BS, 32, 1)
    rounding, pull = torch.finfo(dtype).eps, torch.randn_like(found)
    assert (found - expected).norm() < 2 * rounding * expected.norm()
    wanted = torch.autograd.grad(expected, exact, pull.double())
    for one, other in zip(torch.autograd.grad(found, (query, key, value), pull), wanted, strict=True):
        assert (one - other).norm() < 4 * rounding * other.norm()


@pytest.mark.parametrize(
    ("kind", "dtype", "taken"),
    [
        ("window", torch.bfloat16, "triton"),
        ("window", torch.float32, "flex attention"),
        ("bank", torch.bfloat16, "triton"),
        ("bank", torch.float32, "flex attention"),
    ],
)
def test_chosen_names_the_implementation_of_window_attention(
    kind: str, dtype: torch.dtype, taken: str, recwarn: pytest.WarningsRecorder
) -> None:
    """By the size of a head, which a layer's weights do not have."""
    config = replace(KINDS[kind], width=256, attention_every=1)
    mixer = TitanModel(config).to("cuda", dtype).blocks[0].mixer
    mixer.implementation = "auto"
    assert (mixer.active_implementation(), len(recwarn)) == (taken, 0)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("implementation", "in_order"), [("reference", False), ("reference", True), ("auto", True)])
def test_attention_to_a_bank_matches_the_reference(
    implementation: str, in_order: bool, dtype: torch.dtype, head_dim: int
) -> None:
    """Heads of every size: what is read beside the values has to fit in."""
    config = TitanConfig(
        vocabulary=211, width=4 * head_dim, layers=1, heads=4, attention_every=1, segment=32, memory_slots=8
    )
    tokens, _, documents = batch()
    positions = TokenPositions.whole(tokens.cuda(), documents.cuda(), config)
    assert positions.block_masks is not None
    sizes = (4, head_dim), (2, head_dim), (2, head_dim), (4, head_dim), (2, head_dim)
    given = [torch.randn(2, 300, *size, device="cuda", dtype=dtype).requires_grad_() for size in sizes]
    score = torch.randn(2, 300, device="cuda").mul(2).requires_grad_()

    def attend(
        query: Tensor, key: Tensor, value: Tensor, far_query: Tensor, far_key: Tensor, score: Tensor, plain: bool
    ) -> Tensor:
        far = far_query, far_key, torch.nn.functional.logsigmoid(score)
        if plain:
            return windowed_attention.reference_attention(
                query, key, value, positions.positions_BS, positions.documents_BS, 32, 1, far
            )
        return windowed_attention.windowed_attention(query, key, value, positions, 32, 1, far, implementation)

    exact = [one.detach().double().requires_grad_() for one in (*given, score)]
    expected = attend(*exact, plain=True)
    with deterministic(in_order):
        found = attend(*given, score, plain=False)
        pull = torch.randn_like(found)
        gradients = torch.autograd.grad(found, (*given, score), pull)
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    assert (found - expected).norm() < 4 * rounding * expected.norm()
    for one, other in zip(gradients, torch.autograd.grad(expected, exact, pull.double()), strict=True):
        assert (one - other).norm() < 8 * rounding * other.norm()


def test_heads_too_small_for_flex_attention_warn() -> None:
    model = TitanModel(replace(KINDS["window"], width=32, heads=4)).eval()
    tokens, _, _ = batch()
    with torch.no_grad():
        expected = model(tokens)
        with pytest.warns(UserWarning, match="head dimension of 8 is slow on a GPU"):
            found = model.cuda()(tokens.cuda())
    assert (found.cpu() - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize(("granularity", "runs"), [("selective", 2), ("block", 4)])
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_what_selective_recomputing_keeps_runs_once(update: str, granularity: str, runs: int) -> None:
    model = TitanModel(replace(BANK, attention_every=0, memory_update=update)).cuda()
    model.gradient_checkpointing_enable(granularity)
    tokens, targets, _ = batch()
    with torch.profiler.profile() as profile:
        model.loss(tokens.cuda(), targets.cuda()).backward()
        torch.cuda.synchronize()
    # Of the forward pass alone; calls of the operator say nothing, as one that is kept is called and not run.
    assert sum(event.count for event in profile.key_averages() if event.key == "output_kernel") == runs


@torch.no_grad()
def test_a_bank_on_the_gpu_keeps_what_it_keeps_on_the_cpu() -> None:
    """Long enough for merges and evictions, in the same order of scores."""
    torch.manual_seed(0)
    exact = TitanModel(replace(BANK, merge_cosine=0.4)).eval()
    model = copy.deepcopy(exact).cuda()
    tokens = torch.randint(211, (2, 400))
    _, expected = exact.advance(tokens, exact.new_state(2))
    _, state = model.advance(tokens.cuda(), model.new_state(2))
    stats, wanted = model.get_memory_stats(state), exact.get_memory_stats(expected)
    assert wanted["merges"] > 0 and wanted["evictions"] > 0
    for name in ("writes", "merges", "evictions", "used", "mass"):
        assert stats[name] == wanted[name], name
    found = dict(state.named_tensors())
    for name, one in expected.named_tensors():
        torch.testing.assert_close(found[name].cpu(), one, rtol=1e-3, atol=1e-3)
