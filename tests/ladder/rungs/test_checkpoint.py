import copy
import tomllib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.checkpoint import Checkpoint, find_blocks, find_layers
from redline.machine.machine import Machine

GRANULARITIES = ("block", "layer", "selective")


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.drop = nn.Dropout(drop)
        self.kind = "mlp"

    def forward(self, x: Tensor, *, scale: float = 1.0, debug: bool = False) -> Tensor:
        return x + scale * self.drop(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self, width: int = 13, depth: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            assert isinstance(block, Block) and block.kind == "mlp"
            x = block(x, scale=0.5, debug=True)
        return self.last(x)


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def gradients_after(model: nn.Module, plan: str, batches: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    plan_ = Plan.parse(plan)
    job = Job.of(model, tuple(batches[:1]), loss=squared, optimizer=sgd)
    plan_, job = plan_.build(job, Machine.detect(str(job.device)))
    step = job.finish()
    for index, batch in enumerate(batches):
        torch.manual_seed(index)
        step(batch)
    return step.gradients(), {rung.name: rung.proof(job) for rung in plan_.rungs}


def batches_of(count: int = 3, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(7, 5, device=device) for _ in range(count)]


@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gradients_are_exactly_those_of_the_plain_model(granularity: str, drop: float) -> None:
    model, batches = Model(drop=drop), batches_of()
    expected, _ = gradients_after(model, "eager", batches)
    seen, proofs = gradients_after(model, f"checkpoint(granularity={granularity})", batches)
    assert expected.keys() == seen.keys() and len(seen) == len(list(model.parameters()))
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0
        assert torch.equal(gradient, seen[name]), name
    assert "4 " in proofs["checkpoint"] and "12 of 12 forward passes recomputed" in proofs["checkpoint"]
    if granularity == "selective":
        assert "saved the results of addmm" in proofs["checkpoint"]


def test_block_holds_less_than_the_plain_model_and_selective_less_than_all() -> None:
    def held_bytes(rung: Checkpoint | None) -> int:
        job = Job.of(Model(width=32, depth=6), loss=squared, optimizer=sgd)
        job = job if rung is None else rung.apply(job)
        with torch.profiler.profile(profile_memory=True) as profile:
            output = job.model(torch.randn(64, 5))
        assert output.requires_grad
        return sum(event.self_cpu_memory_usage for event in profile.events())

    plain, block, selective = (
        held_bytes(None),
        held_bytes(Checkpoint("block")),
        held_bytes(Checkpoint("selective")),
    )
    assert block < selective < plain
    assert block < plain / 3


def test_dropout_repeats_its_mask() -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(50))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight, 0.5, self.training)

    model = nn.Sequential(Mask(), Mask())
    job = Checkpoint().apply(Job.of(model, loss=squared, optimizer=sgd))
    x = torch.ones(3, 50, requires_grad=True)
    output = job.model(x)
    output.sum().backward()
    assert x.grad is not None
    assert 0 < int((output != 0).sum()) < 150
    assert torch.equal(x.grad != 0, output != 0)


def test_the_users_model_and_the_flags_stay_as_they_are() -> None:
    model = Model(drop=0.1)
    before, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    batch = torch.randn(2, 5)
    model.eval()
    expected = model(batch)
    model.train()
    gradients_after(model, "checkpoint", batches_of(1))
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    model.eval()
    assert torch.equal(model(batch), expected)
    assert torch.is_grad_enabled()


def test_names_parameters_and_classes_of_the_copy_stay_reachable() -> None:
    job = Job.of(Model(), loss=squared, optimizer=sgd)
    names = [name for name, _ in job.model.named_modules()]
    parameters = dict(job.model.named_parameters())
    applied = Checkpoint().apply(job)
    assert [name for name, _ in applied.model.named_modules()] == names
    assert all(p is parameters[name] for name, p in applied.model.named_parameters())
    assert len({type(block) for block in applied.model.blocks}) == 1
    copied = copy.deepcopy(applied.model)
    assert torch.equal(copied(torch.ones(1, 5)), applied.model(torch.ones(1, 5)))


def test_every_second_block() -> None:
    _, proofs = gradients_after(Model(depth=5), "checkpoint(every=2)", batches_of(1))
    assert "3 blocks" in proofs["checkpoint"] and "3 of 3" in proofs["checkpoint"]
    with pytest.raises(RungError, match="every"):
        Checkpoint(every=0)


def test_a_model_without_blocks_is_told_why_not() -> None:
    machine = Machine.detect("cpu")
    plain = Job.of(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)), loss=squared, optimizer=sgd)
    assert "no repeated blocks" in Checkpoint().why_not(machine, plain)
    assert Checkpoint().why_not(machine) == ""
    flat = Job.of(nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2)]), loss=squared)
    assert Checkpoint().why_not(machine, flat) == ""
    assert "granularity=block" in Checkpoint("layer").why_not(machine, flat)
    with pytest.raises(Unavailable):
        Plan.parse("checkpoint").build(plain, machine)


def test_proof_is_empty_without_a_backward_pass() -> None:
    job = Checkpoint().apply(Job.of(Model(), loss=squared, optimizer=sgd))
    assert Checkpoint().proof(job) == ""
    with torch.no_grad():
        job.model(torch.randn(2, 5))
    assert Checkpoint().proof(job) == ""


def test_blocks_inside_stages_are_found() -> None:
    model = nn.Sequential(*[nn.Sequential(Block(4, 0.0), Block(4, 0.0)) for _ in range(2)])
    assert list(find_blocks(model)) == ["0.0", "0.1", "1.0", "1.1"]
    assert list(find_layers(find_blocks(model))) == ["0.0.mlp", "0.1.mlp", "1.0.mlp", "1.1.mlp"]


def test_torch_transformer_layers() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

    model, batches = Encoder(), [torch.randn(2, 5, 12)]
    expected, _ = gradients_after(model, "eager", batches)
    for granularity in GRANULARITIES:
        seen, _ = gradients_after(model, f"checkpoint(granularity={granularity})", batches)
        assert all(torch.equal(seen[name], gradient) for name, gradient in expected.items())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised inside torch's own compiler
@pytest.mark.parametrize("granularity", ["block", "selective"])
def test_under_a_compiler(granularity: str) -> None:
    model, x = Model(depth=2), torch.randn(7, 5)
    model(x).square().mean().backward()
    rung = Checkpoint(granularity)
    job = rung.apply(Job.of(model, loss=squared, optimizer=sgd))
    job.model.zero_grad()
    # aot_eager partitions the graph as inductor does, without needing a C++ compiler's time.
    torch.compile(job.model, backend="aot_eager_decomp_partition", fullgraph=True)(x).square().mean().backward()
    for (name, expected), seen in zip(model.named_parameters(), job.model.parameters(), strict=True):
        torch.testing.assert_close(seen.grad, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert "traced 2 times by the compiler" in rung.proof(job)


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at .grad of the activations between blocks
def test_blocks_compiled_one_by_one_share_their_code() -> None:
    job = Checkpoint().apply(Job.of(Model(depth=5), loss=squared, optimizer=sgd))
    for block in job.model.blocks:
        block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    job.model(torch.randn(7, 5)).sum().backward()
    assert "traced 1 times" in Checkpoint().proof(job)


class Breaking(Block):
    def forward(self, x: Tensor, *, scale: float = 1.0, debug: bool = False) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, scale=scale, debug=debug)


@pytest.mark.filterwarnings("ignore")  # as above
def test_proof_counts_runs_outside_of_compiled_graphs() -> None:
    model = Model(depth=2)
    for block in model.blocks:
        block.__class__ = Breaking
    job = Checkpoint().apply(Job.of(model, loss=squared, optimizer=sgd))
    for block in job.model.blocks:
        block.compile(backend="aot_eager_decomp_partition")
    job.model(torch.randn(7, 5)).sum().backward()
    # Each runs forward and again in backward.
    assert "blocks ran 4 times outside of compiled graphs" in Checkpoint().proof(job)


def test_round_trip() -> None:
    plan = Plan((Checkpoint("selective", every=2),))
    assert str(plan) == "checkpoint(granularity=selective, every=2)"
    assert Plan.parse(str(plan)) == plan == Plan.from_document(tomllib.loads(plan.to_toml()))
    assert Checkpoint.variants(Machine.detect("cpu")) == tuple(map(Checkpoint, GRANULARITIES))
    with pytest.raises(RungError, match="granularity"):
        Checkpoint("everything")


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_on_a_gpu_with_dropout_memory_falls_and_gradients_stay(granularity: str) -> None:
    torch.manual_seed(0)
    model = Model(width=256, depth=12, drop=0.1).cuda()
    batches = [torch.randn(8192, 5, device="cuda")]

    def peak_and_gradients(plan: str) -> tuple[int, dict[str, Tensor]]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seen, _ = gradients_after(model, plan, batches)
        return torch.cuda.max_memory_allocated(), {name: g.clone() for name, g in seen.items()}

    plain, expected = peak_and_gradients("eager")
    less, seen = peak_and_gradients(f"checkpoint(granularity={granularity})")
    assert less < plain
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)
