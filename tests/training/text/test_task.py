"""A language model learns from packed text, the same in parts and resumed, under a plan and in low precision."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from redline.errors import RedlineError
from redline.machine.machine import Machine
from redline.training.arithmetic import WorkingCopy
from redline.training.loop import train
from redline.training.text import trained_model as trained_model_module
from redline.training.text.config import TextTraining
from redline.training.text.corpus import prepare
from redline.training.text.packing import NO_TARGET
from redline.training.text.sources import Sources
from redline.training.text.task import TextTask

CPU = torch.device("cpu")


def make(path: Path, **loop: object) -> TextTask:
    training = TextTraining.read(path)
    training = replace(training, loop=replace(training.loop, **loop))
    corpus = prepare(Sources.find(training.data.sources), training.tokenizer, Path(training.data.shards))
    return TextTask(training.with_batch(training.data.batch), corpus, CPU)


def run(task: TextTask, out: Path, **options: object) -> list[float]:
    losses: list[float] = []
    train(task, task.training.loop, out, CPU, on_progress=lambda seen: losses.append(seen.loss), **options)
    return losses


def test_it_learns_and_validates_on_held_out_documents(config: Callable[..., Path], tmp_path: Path) -> None:
    task = make(config(("steps = 8", "steps = 30"), ("validate_every = 4", "validate_every = 30")))
    before = task.validate(task.model)["validation_loss"]
    outcome = train(task, task.training.loop, tmp_path / "out", CPU)
    assert outcome.figures["validation_loss"] < 0.9 * before
    assert task.held_out is not None and len(task.held_out.lengths) == 6 and len(task.rows.lengths) == 54
    assert task.items_per_step == 87 and 0 < task.padding_share < 1


def test_the_loss_against_a_plain_one(config: Callable[..., Path]) -> None:
    """Each document alone through the model, without packing."""
    task = make(config())
    batch = task.rows.batch(0, 3)
    total, count = 0.0, 0
    for tokens, targets, documents in zip(batch.tokens_BS, batch.targets_BS, batch.packing.documents_BS, strict=True):
        for number in documents.unique():
            inside = documents == number
            logits = task.model(tokens[inside][None])[0]
            total += float(F.cross_entropy(logits.detach(), targets[inside], ignore_index=NO_TARGET, reduction="sum"))
            count += int((targets[inside] != NO_TARGET).sum())
    assert float(task.loss(0).detach()) == pytest.approx(total / count, rel=1e-5)
    assert count == batch.targets < 87


def test_accumulated_parts_equal_the_whole_step(config: Callable[..., Path], tmp_path: Path) -> None:
    whole = make(config(("batch = 3", "batch = 6")))
    parts = make(config(("batch = 3", "batch = 2\naccumulate = 3")))
    assert whole.identity == parts.identity
    a, b = run(whole, tmp_path / "a"), run(parts, tmp_path / "b")
    assert a == pytest.approx(b, rel=1e-4) and len(a) == 8


def test_a_batch_is_drawn_by_its_step_alone(config: Callable[..., Path]) -> None:
    first, second = make(config()), make(config())
    there = [float(first.loss(step).detach()) for step in range(5)]
    assert [float(second.loss(step).detach()) for step in (3, 0, 4)] == [there[3], there[0], there[4]]
    assert len(set(there)) == 5


def test_another_model_text_or_batch_is_another_training(config: Callable[..., Path], tmp_path: Path) -> None:
    run(make(config()), tmp_path / "out")
    for old, new, said in (
        ("width = 16", "width = 32", "its width is 16, not 32"),
        ("batch = 3", "batch = 4", "its tokens_per_step is 87, not 116"),
        ("vocabulary = 280", "vocabulary = 270", "belongs to another training"),
        ("steps = 8", 'steps = 8\noptimizer = "muon"', "its optimizer is adamw, not muon"),
    ):
        with pytest.raises(RedlineError, match=said):
            run(make(config((old, new))), tmp_path / "out", resume=True)
    longer = make(config(("steps = 8", "steps = 10")))
    assert len(run(longer, tmp_path / "out", resume=True)) == 2


@pytest.mark.parametrize(
    "plan",
    [
        "checkpoint",
        "compress_activations(min_bytes=0)",
        "compress_activations(format=int8, min_bytes=0)",
        "compress_activations(format=fp8, min_bytes=0)",
        "fused_optimizer(backend=foreach)",
    ],
)
def test_a_plan_is_applied(config: Callable[..., Path], tmp_path: Path, plan: str) -> None:
    plain, planned = make(config()), make(config(), plan=plan)
    said = planned.trained.active(planned.optimizer(), planned.training)
    assert f"rung {plan}" in said
    losses = run(planned, tmp_path / "planned")
    assert losses == pytest.approx(run(plain, tmp_path / "plain"), rel=0.02)
    assert planned.trained.plan.rungs[0].proof(planned.trained.job)
    if "foreach" in plan:
        assert any("foreach" in line for line in said)


def test_the_shipped_plan_is_the_default(config: Callable[..., Path]) -> None:
    cpu, gpu = Machine.detect("cpu"), replace(Machine.detect("cpu"), device="cuda:0")
    plain, eager = (TextTraining.read(config(("steps = 8", f"steps = 8{line}"))) for line in ("", '\nplan = "eager"'))
    assert [str(trained_model_module.plan_of(plain, machine)) for machine in (cpu, gpu)] == ["eager", "fused_ops"]
    assert str(trained_model_module.plan_of(eager, gpu)) == "eager"
    task = make(config())
    assert any(
        line.startswith("no plan: `redline climb") for line in task.trained.active(task.optimizer(), task.training)
    )


@pytest.mark.parametrize(("precision", "ema_decay"), [("bf16", 0.9), ("fp16", 0.0)])
def test_low_precision_follows_fp32_and_resumes_exactly(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, ema_decay: float
) -> None:
    monkeypatch.setattr(trained_model_module, "resolve_precision", lambda asked, device: asked)
    path = config(("steps = 8", "steps = 4"), ("validate_every = 4", "validate_every = 2"), ("batch = 3", "batch = 2"))
    exact = run(make(path, ema_decay=ema_decay), tmp_path / "exact")

    def low() -> TextTask:
        return make(path, precision=precision, ema_decay=ema_decay, checkpoint_minutes=0.0)

    task = low()
    losses = run(task, tmp_path / "low")
    assert losses == pytest.approx(exact, rel=0.02) and losses != exact
    assert isinstance(task.arithmetic, WorkingCopy) and task.trained.precision == precision
    assert {weight.dtype for weight in task.model.parameters()} == {torch.float32}
    assert {w.dtype for w in task.trained.module.parameters()} == {
        {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    }
    # The copy is the masters rounded, after every step and after judging.
    for master, own in zip(task.model.parameters(), task.trained.module.parameters(), strict=True):
        assert torch.equal(master.to(own.dtype), own)
    half = low()
    parts: list[float] = []

    def stop(seen: object) -> None:
        parts.append(seen.loss)
        if len(parts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(half, half.training.loop, tmp_path / "parts", CPU, on_progress=stop)
    assert parts[:2] + run(low(), tmp_path / "parts", resume=True) == losses


def test_validation_uses_the_averaged_weights(config: Callable[..., Path], tmp_path: Path) -> None:
    task = make(config(), ema_decay=0.9)
    outcome = train(task, task.training.loop, tmp_path, CPU)
    assert outcome.model is not task.model
    assert task.validate(outcome.model) == outcome.figures != task.validate(task.model)


def test_more_text_than_there_is(config: Callable[..., Path]) -> None:
    path = config(("length = 29", "length = 5000"), ("context = 40", "context = 5000"))
    with pytest.raises(RedlineError, match="do not fill one row of 5,000"):
        make(path)


def test_steps_run_with_deterministic_kernels(config: Callable[..., Path]) -> None:
    task = make(config())
    with task.around():
        assert torch.are_deterministic_algorithms_enabled()
        task.loss(0).backward()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    said = r"no deterministic kernel for put_: set deterministic = false under"
    with pytest.raises(RedlineError, match=said), task.around():
        raise RuntimeError("put_ does not have a deterministic implementation, but you set 'torch.use_…'")
    with pytest.raises(RuntimeError, match="something else"), task.around():
        raise RuntimeError("something else")
    with make(config(), deterministic=False).around():
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_log_names_the_kernels(config: Callable[..., Path], device: str, wanted: bool) -> None:
    task = make(config(), deterministic=wanted)
    trained = replace(task.trained, machine=replace(task.trained.machine, device=device))
    told = [line for line in trained.active(task.optimizer(), task.training) if "deterministic" in line]
    assert len(told) == (device != "cpu") and all(("may differ" in line) != wanted for line in told)


def test_z_loss_is_for_training_alone(config: Callable[..., Path]) -> None:
    plain, penal = make(config()), make(config(), z_loss=0.1)
    assert float(penal.loss(0).detach()) > float(plain.loss(0).detach()) + 0.01
    assert penal.validate(penal.model) == plain.validate(plain.model)
    inputs = plain.rows.batch(0, 3).inputs(plain.device)
    judged = [float(task.trained.module.eval()(**inputs).detach()) for task in (plain, penal)]
    assert judged[0] == judged[1]


def test_a_plan_may_not_exchange_the_weights(config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(plan: object, job: object, machine: object) -> tuple[object, object]:
        job.model.model.norm.weight = torch.nn.Parameter(job.model.model.norm.weight.detach().clone())
        return plan, job

    monkeypatch.setattr(trained_model_module.Plan, "build", exchange)
    with pytest.raises(RedlineError, match="replaces parameters"):
        make(config())


def test_flops_are_those_of_the_products(config: Callable[..., Path]) -> None:
    """Against torch's own count of a forward pass, whose attention is not causal."""
    from torch.utils.flop_counter import FlopCounterMode

    task = make(config())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(task.model)(task.rows.batch(0, 1).tokens_BS)
    attention = 4 * 29 * 29 * 16 * 3
    counted = counter.get_total_flops()
    # A token attends in its own document alone, and those are shorter than a row.
    assert 1 < task.attended < 29
    products = round((task.flops_per_item - 6 * 3 * task.attended * 16) / 3 * 29)
    assert counted - products in (0, attention)


@pytest.mark.filterwarnings("ignore")  # what dynamo warns of differs from version to version
def test_compiled_blocks_stay_compiled_in_training_and_evaluation(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled for training and again for evaluation: with memory-124m more often than dynamo's limit of 8."""

    def compile_without_inductor(
        block: torch.nn.Module, fullgraph: bool, dynamic: bool | None, options: object
    ) -> None:
        block._compiled_call_impl = torch.compile(block._call_impl, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_inductor)
    short = ("steps = 8", "steps = 1"), ("warmup_steps = 2", "warmup_steps = 0")
    plan = ('precision = "fp32"', 'precision = "fp32"\nplan = "compile(regional=true)"')
    task = make(config(plan, *short))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        train(task, task.training.loop, tmp_path / "out", CPU)
        assert torch._dynamo.config.recompile_limit == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
