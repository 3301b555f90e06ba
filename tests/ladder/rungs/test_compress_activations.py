import copy
import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import PlanError, Refused, RungError
from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.compress_activations import CompressActivations, Compression, Packed
from redline.machine.machine import Machine

# Relative step of each format: bf16 has a 7-bit mantissa, e4m3 a 3-bit one, int8 126 steps to the largest.
STEPS = {"bf16": 2**-7, "fp8": 2**-3, "int8": 1 / 126}


class Attention(nn.Module):
    """Its input is saved by three projections, and its weights by all four."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.query(x) @ self.key(x).transpose(-2, -1) / x.shape[-1] ** 0.5, -1)
        return self.out(scores @ self.value(x))


class Model(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x))
        return self.last(x + self.attention(self.norm(x)))


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def train(model: nn.Module, plan: str, batch: Tensor, steps: int = 1) -> tuple[dict[str, Tensor], str, Tensor]:
    built, job = Plan.parse(plan).build(Job.of(model, loss=squared, optimizer=sgd), Machine.detect(str(batch.device)))
    step = job.finish()
    loss = torch.stack([step(batch) for _ in range(steps)])
    proof = built.rungs[0].proof(job) if built.rungs else ""
    return step.gradients(), proof, loss


@pytest.mark.parametrize("form", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packing_rounds_to_the_format(form: str, dtype: torch.dtype) -> None:
    values = torch.randn(1003, dtype=dtype) * torch.logspace(-3, 3, 1003, dtype=dtype)
    packed = Packed.of(values, form)
    back = packed.flat()
    assert back.dtype == dtype and back.shape == values.shape
    largest = values.abs().max()
    if form == "bf16":
        assert ((back - values).abs() <= values.abs() * STEPS[form] / 2).all()
    elif form == "fp8":
        # Half a step of the value, or of the smallest step that e4m3 has at this scale (2**-9 of 416).
        assert ((back - values).abs() <= values.abs() * STEPS[form] / 2 + largest / 416 * 2**-10).all()
    else:
        groups = nn.functional.pad(values, (0, -1003 % 256)).view(-1, 256).abs().amax(1)
        limit = groups.repeat_interleave(256)[:1003] * STEPS[form] * 0.501
        assert ((back - values).abs() <= limit).all()
    assert packed.nbytes < values.nbytes / (1.9 if form == "bf16" else 3.5)


@pytest.mark.parametrize("form", STEPS)
def test_zeros_and_nan_survive_packing(form: str) -> None:
    assert torch.equal(Packed.of(torch.zeros(300), form).flat(), torch.zeros(300))
    for poison in (float("nan"), float("inf")):
        values = torch.ones(300)
        values[7] = poison
        assert not torch.isfinite(Packed.of(values, form).flat()[7])


@pytest.mark.parametrize("form", STEPS)
def test_infinities_survive_and_do_not_affect_neighbors(form: str) -> None:
    values = torch.randn(777)
    plain = Packed.of(values, form).flat()
    plain[500], plain[501] = float("inf"), -float("inf")
    values[500], values[501] = float("inf"), -float("inf")
    seen = Packed.of(values, form).flat()
    apart = torch.arange(777).sub(500).abs() > (256 if form == "int8" else 777)
    assert torch.equal(seen[apart], plain[apart]) and torch.equal(seen.isinf(), values.isinf())
    assert torch.equal(seen[500:502], values[500:502])
    # Three bits of mantissa round by a sixteenth at the most; int8 by half of a 126th of the largest of its group.
    assert torch.allclose(seen[:500], values[:500], rtol=2**-4 if form == "fp8" else 0.0, atol=0.02)
    mask = torch.zeros(600).masked_fill(torch.rand(600) < 0.5, -float("inf"))
    assert torch.equal(Packed.of(mask, form).flat(), mask)


@pytest.mark.parametrize("form", STEPS)
def test_a_mask_that_attention_saves_is_kept(form: str) -> None:
    inputs = [torch.randn(2, 3, 33, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(33, 33, dtype=torch.bool).tril()

    def gradients() -> tuple[Tensor, ...]:
        scaled = [each * 1.0 for each in inputs]
        output = nn.functional.scaled_dot_product_attention(*scaled, attn_mask=mask)
        return torch.autograd.grad(output.square().sum(), inputs)

    expected = gradients()
    compression = Compression(nn.Linear(1, 1), form, 0)
    with compression.step():
        seen = gradients()
    assert compression.tensors
    for own, plain in zip(seen, expected, strict=True):
        # The exponential makes more of a rounded score than its step.
        assert (own - plain).norm() / plain.norm() < 4 * STEPS[form]


@pytest.mark.parametrize("form", STEPS)
def test_loss_is_untouched_and_gradients_are_close(form: str) -> None:
    model, batch = Model(), torch.randn(5, 33, 7)
    expected, _, loss = train(model, "eager", batch)
    seen, proof, packed_loss = train(model, f"compress_activations(format={form}, min_bytes=0)", batch)
    assert torch.equal(loss, packed_loss)
    assert expected.keys() == seen.keys()
    different = 0
    for name, gradient in expected.items():
        error = (seen[name] - gradient).norm() / gradient.norm()
        different += int(error > 0)
        assert error < STEPS[form], name
    assert different, "nothing was rounded, so nothing was packed"
    assert f"packed as {form}" in proof


def test_shared_activations_are_packed_once_and_weights_never() -> None:
    model = Attention(24)
    compression = Compression(model, "bf16", 0)
    x = torch.randn(5, 33, 24, requires_grad=True) * 2
    with compression.step():
        output = model(x)
    # x (once for three projections), query, key, value, what `out` reads, and the softmax.
    elements = 5 * 33 * 24 * 5 + 5 * 33 * 33
    assert compression.tensors == 6
    assert compression.bytes_before == elements * 4 and compression.bytes_after == elements * 2
    output.sum().backward()


def test_memory_held_between_forward_and_backward_falls() -> None:
    def held_bytes(form: str) -> int:
        model, x = Model(), torch.randn(9, 65, 7)
        context = Compression(model, form, 0).step() if form else torch.enable_grad()
        with torch.profiler.profile(profile_memory=True) as profile, context:
            output = model(x)
        assert output.requires_grad
        return sum(event.self_cpu_memory_usage for event in profile.events())

    plain, bf16, int8 = held_bytes(""), held_bytes("bf16"), held_bytes("int8")
    assert int8 < bf16 < plain
    assert bf16 < 0.6 * plain and int8 < 0.4 * plain


def test_packed_activations_are_freed_with_the_graph() -> None:
    model = Model()
    compression = Compression(model, "bf16", 0)
    with compression.step():
        output = model(torch.randn(3, 5, 7))
        assert len(compression._seen) == compression.tensors > 0
        output.sum().backward()
        del output
        assert len(compression._seen) == 0


def test_tensors_changed_in_place_are_packed_again() -> None:
    w = torch.randn(3, 40, requires_grad=True)
    compression = Compression(nn.Linear(1, 1), "bf16", 0)
    with compression.step():
        x = w * 1.0
        y = x.exp()
        z = y * w
        y2 = torch.exp(x)
        x.add_(1.0)
        (z.sum() + (x * x).sum() + y2.sum()).backward()
    reference = w.detach().double().requires_grad_()
    e = reference.exp()
    ((e * reference).sum() + ((reference + 1) ** 2).sum() + e.sum()).backward()
    assert w.grad is not None and reference.grad is not None
    error = (w.grad - reference.grad).norm() / reference.grad.norm()
    assert error < STEPS["bf16"] / 2


@pytest.mark.parametrize("make", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x.expand(4, 6, 10)])
def test_odd_layouts(make: Any) -> None:
    leaf = torch.randn(6, 10, requires_grad=True)
    compression = Compression(nn.Linear(1, 1), "int8", 0)
    with compression.step():
        odd = make(leaf * 1.0)
        output = odd * odd.detach().clone().requires_grad_()
        output.square().sum().backward()
    reference = leaf.detach().double().requires_grad_()
    odd = make(reference * 1.0)
    (odd * odd.detach()).square().sum().backward()
    assert leaf.grad is not None and reference.grad is not None
    assert (leaf.grad - reference.grad).norm() / reference.grad.norm() < 2 * STEPS["int8"]


def test_small_tensors_and_integers_stay() -> None:
    model, batch = Model(), torch.randn(2, 3, 7)
    # The softmax's input and the first layer's output are the largest that this model saves: 2 × 3 × 24 floats.
    with pytest.raises(Refused, match="smaller than min_bytes=1000000 .the largest has 576 B"):
        train(model, "compress_activations(min_bytes=1000000)", batch)
    with pytest.raises(Refused, match="smaller than min_bytes=577"):
        train(model, "compress_activations(min_bytes=577)", batch)
    assert train(model, "compress_activations(min_bytes=576)", batch)[1]
    _, proof, _ = train(model, "compress_activations(format=int8, min_bytes=0)", torch.randn(1, 1, 7))
    assert proof == "", "tensors smaller than a group of int8 grow, and that is no gain"
    _, proof, _ = train(model, "compress_activations", torch.randn(64, 33, 7))
    assert proof


def test_the_users_model_and_the_hooks_stay_as_they_are() -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    train(model, "compress_activations(min_bytes=0)", torch.randn(2, 3, 7), steps=2)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    calls: list[Tensor] = []

    def count(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        model(torch.randn(2, 3, 7))
    assert calls, "our hooks are gone, so a user's own see every tensor again"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised inside torch's own compiler
def test_around_a_compiled_model() -> None:
    model, batch = Model(), torch.randn(5, 33, 7)
    expected, _, _ = train(model, "eager", batch)
    rung = CompressActivations("bf16", 0)
    job = rung.apply(Job.of(model, loss=squared, optimizer=sgd))
    from dataclasses import replace

    job = replace(job, model=torch.compile(job.model, backend="aot_eager_decomp_partition", fullgraph=True))
    step = job.finish()
    step(batch)
    assert "packed" in rung.proof(job)
    for name, gradient in step.gradients().items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < STEPS["bf16"], name


def test_round_trip_and_bad_options() -> None:
    plan = Plan((CompressActivations("int8", 4096),))
    assert str(plan) == "compress_activations(format=int8, min_bytes=4096)"
    assert Plan.parse(str(plan)) == plan == Plan.from_document(tomllib.loads(plan.to_toml()))
    with pytest.raises(RungError, match="format"):
        CompressActivations("int4")
    with pytest.raises(RungError, match="min_bytes"):
        CompressActivations(min_bytes=-1)
    with pytest.raises(PlanError, match="exclude"):
        Plan.parse("checkpoint + compress_activations")


@pytest.mark.gpu
@pytest.mark.parametrize("form", STEPS)
def test_on_a_gpu_peak_memory_falls(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU())]).cuda()
    batch = torch.randn(16384, 512, device="cuda")

    def peak(plan: str) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(model, plan, batch)
        return torch.cuda.max_memory_allocated()

    assert peak(f"compress_activations(format={form})") < 0.85 * peak("eager")
