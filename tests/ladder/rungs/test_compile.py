import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.compile import Compile
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
needs_compiler = pytest.mark.skipif(bool(Compile().why_not(CPU)), reason="needs a C++ compiler")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x * 2


@pytest.fixture(scope="module", autouse=True)
def vector_instructions_work() -> Iterator[None]:
    """The compiler takes this CPU's vector instructions untested; `search/test_climb` has them tested, for seconds."""
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def inputs(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def build(plan: str, model: nn.Module, **more: Any) -> tuple[Compile, Job]:
    made, job = Plan.parse(plan).build(Job.of(model, (inputs(0),), **more), CPU)
    rung = made.rungs[0]
    assert isinstance(rung, Compile)
    return rung, job


@pytest.mark.cpu
@needs_compiler
@pytest.mark.parametrize(
    "plan,graphs",
    [
        ("compile(fullgraph=true)", "1 graph compiled, no graph break"),
        (
            "compile(mode=max-autotune-no-cudagraphs, coordinate_descent=true)",
            "1 graph compiled, no graph break",
        ),
        ("compile(regional=true)", "1 graph compiled for 3 blocks, no graph break"),
    ],
)
def test_output_is_right_and_the_proof_counts(plan: str, graphs: str) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    rung, job = build(plan, model)
    assert rung.proof(job) == ""
    run = job.finish()
    for seed in (1, 2):
        assert relative_error([model.double()(inputs(seed).double())], [run(inputs(seed))]) < 1e-6
        model.float()
    assert rung.proof(job) == graphs
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    assert model._compiled_call_impl is None and model.blocks[0]._compiled_call_impl is None
    assert job.model.state_dict().keys() == state.keys()


@needs_compiler
def test_graph_breaks_are_counted_and_named() -> None:
    rung, job = build("compile", Breaks().eval())
    job.finish()(inputs(1))
    proof = rung.proof(job)
    assert "2 graphs compiled, 1 graph break (most often: " in proof


@needs_compiler
def test_fullgraph_refuses_a_break() -> None:
    _, job = build("compile(fullgraph=true)", Breaks().eval())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        job.finish()(inputs(1))


@needs_compiler
def test_dynamic_shapes_compile_once_for_many_sizes() -> None:
    model = Net(1).eval()
    for dynamic, graphs in (("true", "1 graph compiled"), ("false", "2 graphs compiled")):
        torch._dynamo.reset()
        rung, job = build(f"compile(dynamic={dynamic})", model)
        run = job.finish()
        for rows in (3, 5):
            assert relative_error([model(inputs(1, rows))], [run(inputs(1, rows))]) < 1e-6
        assert rung.proof(job).startswith(graphs)


@needs_compiler
def test_freezing_takes_weights_as_constants_and_leaks_no_setting() -> None:
    torch.manual_seed(0)
    model = Net(1).eval()
    before = torch._inductor.config.freezing, torch._dynamo.config.recompile_limit
    rung, job = build("compile(freeze=true)", model)
    run = job.finish()
    x = inputs(1)
    expected = model(x)
    assert relative_error([expected], [run(x)]) < 1e-6
    with torch.no_grad():
        for p in job.model.parameters():
            p.mul_(2)
    assert relative_error([expected], [run(x)]) < 1e-6
    assert (torch._inductor.config.freezing, torch._dynamo.config.recompile_limit) == before
    assert rung.proof(job)


def test_settings_change_only_during_compilation() -> None:
    from redline.ladder.rungs.compile import _compiler_settings, _while_compiling

    seen: list[tuple[bool, int]] = []

    def function(x: Tensor) -> None:
        seen.append((torch._inductor.config.freezing, torch._dynamo.config.recompile_limit))

    run = _while_compiling(function, settings=functools.partial(_compiler_settings, True, 5))
    for rows in (3, 3, 4, 3):
        run(inputs(0, rows))
    default = torch._dynamo.config.recompile_limit
    assert [freezing for freezing, _ in seen] == [True, False, True, False]
    assert [limit for _, limit in seen] == [40, default, 40, default]


@needs_compiler
def test_training_learns_as_eager_does() -> None:
    torch.manual_seed(0)
    model = Net(1)
    more = {"loss": lambda y, b: (y**2).mean(), "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    eager = Job.of(model, (inputs(0),), **more).finish()
    rung, job = build("compile", model, **more)
    step = job.finish()
    for seed in range(3):
        assert float(step(inputs(seed))) == pytest.approx(float(eager(inputs(seed))), rel=1e-5)
    expected = eager.gradients()
    assert expected.keys() == step.gradients().keys()
    assert relative_error(list(expected.values()), list(step.gradients().values())) < 1e-5
    assert rung.proof(job)


def test_blocks_that_repeat_are_found_once() -> None:
    from redline.ladder.rungs.compile import _repeated_blocks

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Net() for _ in range(3)), nn.Linear(8, 8))
            self.two = nn.ModuleList(Block() for _ in range(2))
            self.flat = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    model = Nested()
    assert _repeated_blocks(model) == list(model.layers[:3])


def test_reasons_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = replace(CPU, device="cuda:0", versions={"torch": "2"})
    assert "pip install triton" in Compile().why_not(cuda)
    assert "CUDA graphs" in Compile(mode="reduce-overhead").why_not(CPU)
    assert "no list of modules has 3 of one class" in Compile(regional=True).why_not(CPU, Job.of(Net(2)))
    training = Job.of(Net(), loss=lambda y, b: y.mean(), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    assert "training" in Compile(freeze=True).why_not(CPU, training)
    with pytest.raises(Unavailable, match="reduce-overhead"):
        Plan.parse("compile(mode=reduce-overhead)").build(Job.of(Net()), CPU)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "C++ compiler" in Compile().why_not(CPU)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert (
        Compile().why_not(cuda)
        == Compile().why_not(CPU)
        == "it is disabled by the environment variable TORCH_COMPILE_DISABLE=1"
    )


def test_variants_fit_the_machine() -> None:
    cuda = replace(CPU, device="cuda:0")
    assert [str(v) for v in Compile.variants(cuda)] == [
        "compile(mode=reduce-overhead)",
        "compile(mode=reduce-overhead, freeze=true)",
        "compile(mode=max-autotune, freeze=true)",
    ]
    assert not any(v.freeze for v in Compile.variants(cuda, training=True))
    assert all(not v.why_not(CPU) for v in Compile.variants(CPU)) or Compile().why_not(CPU)


def test_plan_round_trip() -> None:
    plan = Plan((Compile(mode="max-autotune", fullgraph=True, dynamic="false", regional=True),))
    assert Plan.parse(str(plan)) == plan


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:TensorFloat32")
def test_on_cuda_the_advice_to_enable_tf32_is_suppressed() -> None:
    from torch._inductor import compile_fx

    compile_fx._warn_tf32_disabled.cache_clear()
    Plan.parse("compile").apply(Net().eval().cuda(), samples=inputs(0).cuda())(inputs(1).cuda())


# The compiler warns of settings that it would like better; they are none of this test's business.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "regional"),
    [("default", False), ("default", True), ("reduce-overhead", True), ("max-autotune", False)],
)
def test_on_cuda_results_are_kept_and_can_be_fed_back(mode: str, regional: bool) -> None:
    torch.manual_seed(0)
    model = Net().eval().cuda()
    plan = Plan((Compile(mode=mode, regional=regional),))
    _, job = plan.build(Job.of(model, (inputs(0).cuda(),)), Machine.detect("cuda"))
    run = job.finish()
    seen, expected = [], []
    x = y = inputs(1).cuda()
    for _ in range(6):
        x, y = run(x), model(y)
        seen.append(x)
        expected.append(y)
    # fp32 without TF32, six passes deep.
    assert relative_error(expected, seen) < 1e-5
    assert plan.rungs[0].proof(job)
    assert job.evidence["compile"].uses_cuda_graphs == (mode != "default")


# The compiler warns of settings that it would like better; they are none of this test's business.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_cuda_training_learns_as_eager_does(mode: str) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    more = {"loss": lambda y, b: (y**2).mean(), "optimizer": lambda ps: torch.optim.SGD(ps, lr=0.1)}
    batches = [inputs(seed).cuda() for seed in range(6)]
    eager = Job.of(model, (batches[0],), **more).finish()
    expected = [eager(b) for b in batches]
    plan = Plan((Compile(mode=mode),))
    _, job = plan.build(Job.of(model, (batches[0],), **more), Machine.detect("cuda"))
    step = job.finish()
    seen = [step(b) for b in batches]
    assert relative_error(expected, seen) < 1e-4
    assert relative_error(list(eager.gradients().values()), list(step.gradients().values())) < 1e-4


@pytest.mark.parametrize("root", [nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), nn.Linear(5, 3)])
def test_root_module_of_torch_is_compiled(root: nn.Module) -> None:
    plan, job = Plan.parse("compile").build(Job.of(root.eval()), CPU)
    x = torch.randn(4, 5)
    torch.testing.assert_close(job.finish()(x), root(x).detach(), rtol=1e-5, atol=1e-6)
    assert plan.rungs[0].proof(job).startswith("1 graph compiled")
