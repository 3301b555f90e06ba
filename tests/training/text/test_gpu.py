"""On a GPU: bf16 and a plan learn, a step waits for nobody, and resumed is uninterrupted bit for bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from redline.ladder.batch_size import search
from redline.training.arithmetic import DTYPES, WorkingCopy
from redline.training.checkpoints import Checkpoints, Position, State
from redline.training.loop import Progress, _Loop, train
from redline.training.text.batch_choice import TrainingCase
from redline.training.text.config import TextTraining
from redline.training.text.corpus import prepare
from redline.training.text.sources import Sources
from redline.training.text.task import TextTask

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# In fp32 alone: in half precision it must not be said.
SLOW_ATTENTION = pytest.mark.filterwarnings("ignore:attention in float32 with packed documents")
# What the compiler warns of differs from version to version, and is none of these tests' business.
COMPILER = pytest.mark.filterwarnings("ignore")
WIDER = (
    ("width = 16", "width = 256"),
    ("heads = 2", "heads = 4"),
    ("mlp_width = 24", "mlp_width = 512"),
    ("context = 40", "context = 256"),
    ("length = 29", "length = 256"),
    ("batch = 3", "batch = 8"),
    ("steps = 8", "steps = 12"),
    ("learning_rate = 0.01", "learning_rate = 0.002"),
)


def make(path: Path) -> TextTask:
    training = TextTraining.read(path)
    corpus = prepare(Sources.find(training.data.sources), training.tokenizer, Path(training.data.shards))
    task = TextTask(training.with_batch(training.data.batch), corpus, GPU)
    asked = training.loop.precision
    assert task.trained.precision == (asked if asked != "auto" else "bf16")
    dtypes = {weight.dtype for weight in task.trained.module.parameters()}
    assert dtypes == {DTYPES.get(task.trained.precision, torch.float32)}
    return task


def run(path: Path, out: Path, resume: bool = False, stop_at: int = -1) -> list[float]:
    losses: list[float] = []

    def tell(seen: Progress) -> None:
        losses.append(seen.loss)
        if seen.step == stop_at:
            raise KeyboardInterrupt

    task = make(path)
    train(task, task.training.loop, out, GPU, resume, tell)
    return losses


@pytest.fixture
def wide(config: Callable[..., Path]) -> Callable[..., Path]:
    def write(*exchanges: tuple[str, str]) -> Path:
        return config(*WIDER, *exchanges)

    return write


@pytest.mark.parametrize(
    ("precision", "plan"),
    [
        pytest.param("fp32", "eager", marks=SLOW_ATTENTION),
        pytest.param("fp32", "checkpoint + tf32", marks=SLOW_ATTENTION),
        ("bf16", "eager"),
        pytest.param("bf16", "compile(regional=true)", marks=COMPILER),
        pytest.param("fp16", "compile(regional=true)", marks=COMPILER),
        ("fp16", "checkpoint"),
    ],
)
def test_every_precision_learns_under_a_plan(
    wide: Callable[..., Path], tmp_path: Path, precision: str, plan: str
) -> None:
    losses = run(wide(('precision = "fp32"', f'precision = "{precision}"\nplan = "{plan}"')), tmp_path / "out")
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=SLOW_ATTENTION), "bf16", "fp16"])
def test_resumed_equals_uninterrupted_bit_for_bit(wide: Callable[..., Path], tmp_path: Path, precision: str) -> None:
    lines = f'precision = "{precision}"'
    path = wide(('precision = "fp32"', lines), ("checkpoint_minutes = 10", "checkpoint_minutes = 0"))
    whole = run(path, tmp_path / "whole")
    assert run(path, tmp_path / "again") == whole
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "parts", stop_at=6)
    assert run(path, tmp_path / "parts", resume=True) == whole[5:]


@COMPILER
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_a_memory_model_learns_and_is_resumed_bit_for_bit(
    wide: Callable[..., Path], tmp_path: Path, update: str
) -> None:
    memory = f'attention_every = 2\nsegment = 32\nmemory_slots = 8\nmemory_update = "{update}"'
    path = wide(
        ('kind = "decoder"', 'kind = "memory"'),
        ("context = 256", memory),
        ('precision = "fp32"', 'precision = "bf16"'),
        ("checkpoint_minutes = 10", "checkpoint_minutes = 0"),
    )
    whole = run(path, tmp_path / "whole")
    assert whole[-1] < 0.95 * whole[0]
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "parts", stop_at=6)
    assert run(path, tmp_path / "parts", resume=True) == whole[5:]


@COMPILER
def test_blocks_of_a_deep_memory_model_stay_compiled(wide: Callable[..., Path], tmp_path: Path) -> None:
    """In the evaluations between steps, too: dynamo's own limit is 8 compilations of a block's code."""
    path = wide(
        ('kind = "decoder"', 'kind = "memory"'),
        ("context = 256", "attention_every = 4\nsegment = 32"),
        ("layers = 3", "layers = 12"),
        ('precision = "fp32"', 'precision = "bf16"\nplan = "fused_ops + compile(regional=true)"'),
    )
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        run(path, tmp_path / "out")


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=SLOW_ATTENTION), "bf16"])
def test_a_step_does_not_synchronize(
    wide: Callable[..., Path],
    tmp_path: Path,
    waits_for_nobody: Callable[[], AbstractContextManager[None]],
    precision: str,
) -> None:
    task = make(wide(('precision = "fp32"', f'precision = "{precision}"\nema_decay = 0.9')))
    state = State(task.model, None, task.optimizer(), task.arithmetic, task.identity)
    loop = _Loop(
        task, task.training.loop, state, Checkpoints(tmp_path), GPU, lambda _: None, lambda: 0.0, Position(), None
    )
    for _ in range(3):
        loop._one_step()
    with waits_for_nobody():
        for _ in range(3):
            loop._one_step()


@COMPILER
def test_fp8_follows_bf16(wide: Callable[..., Path], tmp_path: Path) -> None:
    """At a quarter of the other tests' rate, at which losses fall without spikes: those are another matter."""
    pytest.importorskip("torchao")
    losses = []
    for precision in ("fp8", "bf16"):
        lines = f'precision = "{precision}"\nplan = "compile(regional=true)"'
        path = wide(('precision = "fp32"', lines), ("learning_rate = 0.002", "learning_rate = 0.0005"))
        losses.append(run(path, tmp_path / precision))
    fast, usual = losses
    assert fast == pytest.approx(usual, rel=0.02) and fast != usual


def test_8_bit_moments_learn_and_are_resumed(wide: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    lines = 'precision = "bf16"\noptimizer = "adamw8bit"'
    path = wide(('precision = "fp32"', lines), ("checkpoint_minutes = 10", "checkpoint_minutes = 0"))
    whole = run(path, tmp_path / "whole")
    assert whole[-1] < 0.9 * whole[0]
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path / "parts", stop_at=6)
    assert run(path, tmp_path / "parts", resume=True) == pytest.approx(whole[5:], rel=1e-3)


def test_the_batch_is_found(wide: Callable[..., Path]) -> None:
    training = TextTraining.read(wide(("batch = 8", 'batch = "auto"'), ('precision = "fp32"', 'precision = "bf16"')))
    found = search(TrainingCase(training, 320), max_batch=4096, device="cuda")
    assert found.batch > 64 and found.peak_bytes <= found.budget_bytes


def test_weights_are_computed_with_in_bf16(wide: Callable[..., Path]) -> None:
    task = make(wide(('precision = "fp32"', "")))
    assert task.trained.precision == "bf16" and isinstance(task.arithmetic, WorkingCopy)
