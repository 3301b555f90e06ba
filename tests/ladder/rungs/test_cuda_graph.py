import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.errors import PlanError, RungError
from redline.ladder.job import Job
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs import cuda_graph
from redline.ladder.rungs.compile import Compile, Compiled
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.machine.cuda_graphs import CaptureCounts, GraphedCallable, TrainingState, no_garbage_collection
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
CUDA = replace(CPU, device="cuda:0")


class FakeRecorder:
    """Behaves like a graph: one run fixes the memory, and a replay computes into exactly that memory."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def supports(self, tensors: list[Tensor]) -> bool:
        return all(t.device.type == "cpu" for t in tensors)

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.events.append("warm_up")
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.events.append("capture")
        buffers: list[Tensor] = []
        real = torch.empty_like

        def poisoned(like: Tensor, **kwargs: Any) -> Tensor:
            # What a recording's buffers hold before the first replay is anybody's guess.
            buffer = torch.full_like(like, float("nan")) if like.is_floating_point() else real(like).zero_()
            buffers.append(buffer)
            return buffer

        torch.empty_like = poisoned  # type: ignore[assignment]
        try:
            output = run()
        finally:
            torch.empty_like = real  # type: ignore[assignment]
        static = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output[1])

        def replay() -> None:
            self.events.append("replay")
            supply = iter(buffers)
            torch.empty_like = lambda like, **kwargs: next(supply)  # type: ignore[assignment]
            try:
                _, fresh = run()
            finally:
                torch.empty_like = real  # type: ignore[assignment]
            for old, new in zip(pytree.tree_leaves(static), pytree.tree_leaves(fresh), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        return (output[0], static), replay

    def pool_bytes(self) -> int:
        return 4096


def graphed(function: Callable[..., Any], **options: Any) -> tuple[GraphedCallable, FakeRecorder, CaptureCounts]:
    recorder, tally = FakeRecorder(), CaptureCounts()
    return GraphedCallable(function, recorder, tally, **options), recorder, tally


def inputs(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3)), generator=torch.Generator().manual_seed(seed))


def test_warms_up_then_captures_then_replays() -> None:
    run, recorder, tally = graphed(lambda x: x * 2, warmup_calls=2)
    for seed in range(3):
        assert torch.equal(run(inputs(seed)), inputs(seed) * 2)
    assert recorder.events == ["warm_up", "warm_up", "capture", "replay", "replay", "replay"]
    assert (tally.graphs, tally.replays, tally.uncaptured) == (1, 3, 0)


def test_every_input_signature_gets_its_own_graph() -> None:
    def function(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        flat = pytree.tree_leaves((rest, named))
        return x.double() + sum(float(v.sum() if isinstance(v, Tensor) else v or 0) for v in flat)

    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((inputs(0),), {}),
        ((inputs(0, 3, 2),), {}),
        ((inputs(0).double(),), {}),
        ((inputs(0), 1), {}),
        ((inputs(0), True), {}),
        ((inputs(0), 1.0), {}),
        ((inputs(0),), {"a": inputs(1)}),
        ((inputs(0),), {"b": inputs(1)}),
        ((inputs(0), [inputs(1)]), {}),
        ((inputs(0), (inputs(1),)), {}),
        ((inputs(0), {"k": (inputs(1), None)}), {}),
    ]
    run, _, tally = graphed(function, limit=len(forms))
    for _ in range(2):
        for args, kwargs in forms:
            assert torch.equal(run(*args, **kwargs), function(*args, **kwargs))
    assert tally.graphs == len(forms)
    assert tally.replays == 2 * len(forms)


def test_results_are_not_overwritten_by_later_calls() -> None:
    run, _, _ = graphed(lambda x: (x + 1, {"y": x * 2}))
    first = run(inputs(0))
    run(inputs(1))
    assert torch.equal(first[0], inputs(0) + 1) and torch.equal(first[1]["y"], inputs(0) * 2)


@pytest.mark.parametrize("clone", [True, False])
def test_an_output_can_be_fed_back(clone: bool) -> None:
    run, _, _ = graphed(lambda x: x * 1.5 + 1, clone=clone)
    x = y = inputs(0)
    for _ in range(5):
        x, y = run(x), y * 1.5 + 1
    assert torch.equal(x, y)


def test_without_clone_the_next_call_overwrites() -> None:
    run, _, _ = graphed(lambda x: x + 1, clone=False)
    first = run(inputs(0))
    assert run(inputs(1)) is first


def test_a_model_that_returns_its_input_does_not_give_its_buffer_away() -> None:
    run, _, _ = graphed(lambda x: x)
    first = run(inputs(0))
    run(inputs(1))
    assert torch.equal(first, inputs(0))


def test_calls_beyond_the_limit_run_without_a_graph_and_warn_once() -> None:
    run, recorder, tally = graphed(lambda x: x + 1, limit=2)
    run(inputs(0, 1)), run(inputs(0, 2))
    with pytest.warns(UserWarning, match="2 input signatures"):
        assert torch.equal(run(inputs(0, 3)), inputs(0, 3) + 1)
    assert torch.equal(run(inputs(0, 4)), inputs(0, 4) + 1)
    assert torch.equal(run(inputs(1, 2)), inputs(1, 2) + 1)
    assert (tally.graphs, tally.uncaptured) == (2, 2)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_named_tuples_and_dicts_arrive_as_they_are() -> None:
    run, _, _ = graphed(lambda pair, options: pair.x - pair.y * options["by"])
    for seed in range(2):
        pair = Pair(inputs(seed), inputs(seed + 5))
        assert torch.equal(run(pair, {"by": 2.0}), pair.x - pair.y * 2)


def test_unsupported_inputs_are_refused() -> None:
    run, _, _ = graphed(lambda x, y=None: x)
    with pytest.raises(RungError, match="host memory"):
        run(torch.empty(2, device="meta"))
    with pytest.raises(RungError, match="not hashable"):
        run(inputs(0), {1, 2})


def test_a_failed_capture_raises_one_sentence() -> None:
    run, recorder, _ = graphed(lambda x: x)

    def refuse(run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing.\nmore lines")

    recorder.capture = refuse  # type: ignore[method-assign]
    with pytest.raises(RungError, match=r"cannot be captured: operation not permitted when stream is capturing\.$"):
        run(inputs(0))


def test_a_replay_has_little_overhead() -> None:
    recorder, tally = FakeRecorder(), CaptureCounts()
    run = GraphedCallable(lambda x, y: x, recorder, tally, clone=False)
    x, y = inputs(0), inputs(1)
    run(x, y)
    (recording,) = run.graphs.values()
    recording.replay = lambda: None
    run(x, y)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            run(x, y)
        best = min(best, (time.perf_counter() - start) / 100)
    # Two copies of six numbers are in it; 20 µs is what a plan may add to a call.
    assert best < 20e-6


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        # No bias before the norm: its gradient is zero but for rounding, and Adam would follow the rounding's sign.
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(drop), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "sgd, momentum with dampening": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, dampening=0.5),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
}


def training_job(model: nn.Module, optimizer: str) -> Job:
    return Job.of(model, loss=lambda y, b: ((y - 1) ** 2).mean(), optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_warm_up_of_a_training_step_leaves_no_changes(optimizer: str) -> None:
    """The first call must be exactly one step: weights, running means, states and gradients."""
    torch.manual_seed(0)
    model = Net().train()
    batches = [inputs(seed, 5, 6) for seed in range(2)]
    eager = training_job(model, optimizer).finish()
    step = training_job(model, optimizer).finish()
    recorder, tally = FakeRecorder(), CaptureCounts()
    # Each rehearsal and the recording itself run for real here, as if nothing were undone by itself.
    run = GraphedCallable(step._step, recorder, tally, state=TrainingState(step.model, step.optimizer))
    assert torch.equal(run(batches[0]), eager(batches[0]))
    assert recorder.events == ["warm_up", "warm_up", "warm_up", "capture"]
    for (name, seen), expected in zip(step.model.state_dict().items(), eager.model.state_dict().values(), strict=True):
        assert torch.equal(seen, expected), name
    for name, gradient in eager.gradients().items():
        assert torch.equal(step.gradients()[name], gradient), name
    for seen, expected in zip(step.optimizer.state.values(), eager.optimizer.state.values(), strict=True):
        assert seen.keys() == expected.keys()
        assert all(
            torch.equal(torch.as_tensor(seen[k]), torch.as_tensor(expected[k])) for k in seen if seen[k] is not None
        )


def test_a_float_learning_rate_is_part_of_the_signature() -> None:
    step = training_job(Net(), "sgd").finish()
    state = TrainingState(step.model, step.optimizer)
    before = state.settings()
    step.optimizer.param_groups[0]["lr"] = 0.5
    assert state.settings() != before


def test_each_graph_exposes_its_own_gradients() -> None:
    run, _, _ = graphed(lambda x: x)
    parameter = nn.Parameter(torch.zeros(1))
    one, two = torch.ones(1), torch.full((1,), 2.0)
    run(inputs(0, 1)), run(inputs(0, 2))
    first, second = run.graphs.values()
    first.gradients, second.gradients = [(parameter, one)], [(parameter, two)]
    run(inputs(0, 1))
    assert parameter.grad is one
    run(inputs(0, 2))
    assert parameter.grad is two


def faked(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    recorder = FakeRecorder()
    monkeypatch.setattr(cuda_graph, "CudaGraphCapturer", lambda device: recorder)
    return recorder


def test_the_rung_wraps_a_model_and_proves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    torch.manual_seed(0)
    model = Net().eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    plan, job = Plan.parse("cuda_graph(limit=3)").build(Job.of(model), CUDA)
    run = job.finish()
    assert plan.rungs[0].proof(job) == ""
    for seed in range(3):
        assert torch.equal(run(inputs(seed, 4, 6)), model(inputs(seed, 4, 6)))
    assert plan.rungs[0].proof(job) == "1 graph captured, 3 replays, 4 KiB in the pool"
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())


def test_the_rung_prepares_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    _, job = Plan.parse("cuda_graph").build(training_job(Net(), "adamw"), CUDA)
    (group,) = job.finish().optimizer.param_groups
    assert group["capturable"] is True
    assert isinstance(group["lr"], Tensor) and float(group["lr"]) == pytest.approx(0.01)


def test_reasons_why_not() -> None:
    rung = CudaGraph()
    assert rung.why_not(CPU) == "it needs a CUDA GPU"
    assert rung.why_not(CUDA) == rung.why_not(CUDA, Job.of(Net())) == ""
    assert "host memory" in rung.why_not(CUDA, Job.of(Net(), host_inputs=True))
    assert "grad_scaler" in rung.why_not(CUDA, replace(training_job(Net(), "sgd"), scaler=lambda o: None))
    for graphs, reason in ((True, "CUDA graphs itself"), (False, "")):
        job = Job.of(Net()).with_evidence("compile", Compiled(graphs, 1, 0, Compile().options()))  # type: ignore[arg-type]
        assert reason in rung.why_not(CUDA, job) and bool(reason) == bool(rung.why_not(CUDA, job))
    with pytest.raises(Unavailable, match="CUDA GPU"):
        Plan.parse("cuda_graph").build(Job.of(Net()), CPU)
    with pytest.raises(RungError, match="at least 1"):
        CudaGraph(limit=0)
    with pytest.raises(PlanError, match="exclude"):
        Plan.parse("cuda_graph + streams")


def test_plan_round_trip() -> None:
    plan = Plan((CudaGraph(clone=False, limit=4, rehearsals=5),))
    assert Plan.parse(str(plan)) == plan


def test_nothing_is_collected_during_a_recording() -> None:
    for wanted in (True, False):
        (gc.enable if wanted else gc.disable)()
        try:
            with no_garbage_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == wanted
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("compile(mode=reduce-overhead, freeze=true)", "compile(freeze=true) + cuda_graph"),
        ("compile(mode=max-autotune)", "compile(mode=max-autotune-no-cudagraphs) + cuda_graph"),
        ("bf16 + compile", "bf16 + compile + cuda_graph"),
    ],
)
def test_joining_a_plan_disables_the_graphs_of_compile(before: str, after: str) -> None:
    assert Plan.parse(before).with_rung(CudaGraph()) == Plan.parse(after)
