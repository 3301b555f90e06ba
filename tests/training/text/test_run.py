"""What happens around the loop: a result that cannot be written costs nothing but another try."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.training.journal import read_journal
from redline.training.loop import Progress
from redline.training.text import result as result_module
from redline.training.text.run import prepare_training, run_text
from redline.training.text.task import TextTask

CPU = torch.device("cpu")


def prepare(path: Path, out: Path, resume: bool = False) -> TextTask:
    return prepare_training(path, out, CPU, resume, lambda _: None, lambda _: None, steps=3)


def test_resuming_writes_a_result_that_could_not_be_written(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = config(), tmp_path / "out"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(result_module, "write_text", full)
        with pytest.raises(RedlineError, match="No space left on device; the checkpoint is complete"):
            run_text(prepare(path, out), out, CPU, False, lambda _: None, lambda _: None)
    outcome, result = run_text(prepare(path, out, True), out, CPU, True, lambda _: None, lambda _: None)
    assert outcome.position.step == 3 and result is not None and result.page.is_file()


def test_a_checkpoint_of_another_model_is_known_before_the_text_is_read(
    config: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_text(prepare(config(), out), out, CPU, False, lambda _: None, lambda _: None)
    elsewhere = (str(tmp_path / "shards"), str(tmp_path / "elsewhere"))
    for changes, said in (
        ((("width = 16", "width = 32"),), "its width is 16, not 32"),
        # Of which all else follows that the two have not in common.
        (
            (('kind = "decoder"', 'kind = "memory"'), ("mlp_width = 24\ncontext = 40\n", "")),
            "its kind is decoder, not memory",
        ),
    ):
        other = config(*changes, elsewhere)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(RedlineError, match=f"belongs to another training run: {said}"):
            prepare(other, out, resume=True)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("is_there", [False, True])
def test_a_checkpoint_of_another_text_leaves_no_shards(
    config: Callable[..., Path], tmp_path: Path, is_there: bool
) -> None:
    out = tmp_path / "out"
    run_text(prepare(config(), out), out, CPU, False, lambda _: None, lambda _: None)
    (tmp_path / "other.txt").write_text("Another text, which has another story to tell. " * 400)
    for change, said in (
        (("vocabulary = 280", "vocabulary = 270"), "its text is [0-9,]+ tokens .*, not"),
        (("vocabulary = 280", "vocabulary = 340"), "its vocabulary is 320, not 384"),
        ((str(tmp_path / "text"), str(tmp_path / "other.txt")), "its text is [0-9,]+ tokens .*, not"),
    ):
        path = config(change)
        if is_there:
            prepare(path, tmp_path / "elsewhere")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(RedlineError, match=f"belongs to another training run: {said}"):
            prepare(path, out, resume=True)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_step_without_a_target_is_worth_nothing(config: Callable[..., Path], tmp_path: Path) -> None:
    """Rows of one token have nothing to foretell."""
    path = config(("length = 29", "length = 1"), ("batch = 3", "batch = 1\naccumulate = 2"))
    task = prepare(path, tmp_path / "out")
    task._step = (0, replace(batch := task._batch(0), targets_BS=torch.full_like(batch.targets_BS, -100)))
    assert float(task.loss(0).detach()) == 0


def test_the_log_and_the_page_name_active_optimizations(config: Callable[..., Path], tmp_path: Path) -> None:
    said: list[str] = []
    path = config(
        ("batch = 3", "batch = 3\naccumulate = 2"), ("steps = 8", "steps = 8\nema_decay = 0.9\nz_loss = 1e-4")
    )
    run_text(prepare(path, tmp_path / "out"), tmp_path / "out", CPU, False, lambda _: None, said.append)
    for words in ("precision fp32", "AdamW of", "2 batches accumulated", "decay 0.9", "z-loss 0.0001", "TensorBoard"):
        assert any(words in line for line in said), words
    page = (tmp_path / "out" / "summary.html").read_text()
    assert "z-loss 0.0001" in page and str(tmp_path) not in page


def test_a_rung_that_does_nothing_here_says_so(config: Callable[..., Path], tmp_path: Path) -> None:
    said: list[str] = []
    path = config(("steps = 8", 'steps = 8\nplan = "fused_ops"'))
    run_text(prepare(path, tmp_path / "out"), tmp_path / "out", CPU, False, lambda _: None, said.append)
    (line,) = [line for line in said if "fused_ops" in line]
    assert line.startswith("· rung fused_ops: ") and "7 RMSNorm by reference" in line and "triton" not in line


def test_tensorboard_logs_the_journal(config: Callable[..., Path], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    path = config(("validate_every = 4", "validate_every = 2"))
    run_text(prepare(path, out), out, CPU, False, lambda _: None, lambda _: None)
    entries = read_journal(out / "journal.jsonl")
    seen = EventAccumulator(str(out / "tensorboard")).Reload()
    # The last judgement, after the last step, is one of them.
    for name, steps in (("loss", [1, 2, 3]), ("validation_loss", [2, 3])):
        points = [(one.step, pytest.approx(one.metrics[name], rel=1e-6)) for one in entries if name in one.metrics]
        assert [step for step, _ in points] == steps
        assert [(point.step, point.value) for point in seen.Scalars(name)] == points


def test_a_damaged_checkpoint_warns_once(config: Callable[..., Path], tmp_path: Path) -> None:
    path, out = config(("checkpoint_minutes = 10", "checkpoint_minutes = 0")), tmp_path / "out"
    run_text(prepare(path, out), out, CPU, False, lambda _: None, lambda _: None)
    *_, newest = sorted((out / "checkpoints").iterdir())
    newest.write_bytes(b"")
    with pytest.warns(UserWarning) as told:
        outcome, _ = run_text(prepare(path, out, resume=True), out, CPU, True, lambda _: None, lambda _: None)
    assert outcome.position.step == 3
    assert [str(one.message) for one in told] == [
        f"the checkpoint {str(newest)!r} is damaged: it is truncated. Using the previous checkpoint."
    ]


def test_resuming_with_fewer_steps_logs_a_message(config: Callable[..., Path], tmp_path: Path) -> None:
    path, out, said = config(), tmp_path / "out", []
    run_text(prepare(path, out), out, CPU, False, lambda _: None, lambda _: None)
    task = prepare_training(path, out, CPU, True, lambda _: None, lambda _: None, steps=2)
    outcome, _ = run_text(task, out, CPU, True, lambda _: None, said.append)
    assert outcome.position.step == 3
    assert said[-1] == "nothing to train: the checkpoint already has 3 steps, and 2 were asked for"


def test_skipped_files_are_logged(config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "text" / ".hidden").mkdir()
    for name in ("b.JSON", "b.json", "c.jsonl.gz", "LICENSE", ".hidden/d.bin", ".hidden/e.jsonl", ".f"):
        (tmp_path / "text" / name).write_bytes(b"{}")
    said: list[str] = []
    prepare_training(config(), tmp_path / "out", CPU, False, lambda _: None, said.append, steps=3)
    assert said[0] == "skipped 4 files of other types: .json, .gz, without a suffix"
    for number in range(300):
        (tmp_path / "text" / f"part.{number}\x1b").touch()
    prepare_training(config(), tmp_path / "out", CPU, False, lambda _: None, said.append, steps=3)
    assert re.fullmatch(
        r"skipped 304 files of other types: \.json(, '\.\d+\\x1b'|, \.gz|, without .*){4}, 298 more", said[2]
    )


@pytest.mark.usefixtures("any_precision")
def test_rate_clipping_and_precision_may_change_on_resume(config: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_text(prepare(config(('precision = "fp32"', 'precision = "fp16"')), out), out, CPU, False, print, print)
    calmer = "learning_rate = 0.001\nclip_norm = 0.5"
    path = config(("learning_rate = 0.01", calmer), ("warmup_steps = 2", "warmup_steps = 1"), name="calmer.toml")
    task = prepare_training(path, out, CPU, True, print, print, steps=5)
    with pytest.warns(UserWarning) as told:
        outcome, _ = run_text(task, out, CPU, True, print, print)
    assert outcome.position.step == 5
    assert [str(one.message) for one in told] == [
        "resuming with clip_norm = 0.5; it was 1.0 up to step 3.",
        "resuming with learning_rate = 0.001; it was 0.01 up to step 3.",
        "resuming with precision = fp32; it was fp16 up to step 3.",
        "resuming with warmup_steps = 1; it was 2 up to step 3.",
    ]


@pytest.mark.parametrize("kind", ["decoder", "memory"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("width = 16", "width = 1_000_000", "training .* parameters takes .* lower width or layers under"),
        ("width = 16", "width = 1_000_000_000_000", "lower width(,| or) layers"),
        ("batch = 3", "batch = 1_000_000_000", "a batch of 1,000,000,000 rows of 29 tokens takes .* lower batch"),
    ],
)
def test_a_training_larger_than_memory_raises_before_writing(
    config: Callable[..., Path], tmp_path: Path, kind: str, old: str, new: str, said: str
) -> None:
    path, out = config((old, new), ("context = 40\n", ""), ('kind = "decoder"', f'kind = "{kind}"')), tmp_path / "out"
    with pytest.raises(RedlineError, match=said):
        prepare(path, out)
    assert not out.exists() and not (tmp_path / "shards").exists()


def test_a_trial_shorter_than_the_warmup_is_logged(config: Callable[..., Path], tmp_path: Path) -> None:
    said: list[str] = []
    path = config(("warmup_steps = 2", "warmup_steps = 5"))
    run_text(prepare(path, tmp_path / "out"), tmp_path / "out", CPU, False, lambda _: None, said.append)
    assert any("warmup_steps = 5 do not end within 3 steps, so the full rate is never" in line for line in said)


def test_the_loss_says_which_penalties_it_holds(config: Callable[..., Path], tmp_path: Path) -> None:
    decoder = "layers = 3\nheads = 2\nmlp_width = 24\ncontext = 40"
    memory = "layers = 1\nheads = 2\nattention_every = 1\nsegment = 8\nmemory_slots = 4\nscore_after = 2"
    path = config(('"decoder"', '"memory"'), (decoder, memory), ("steps = 8", "steps = 8\nz_loss = 1e-3"))
    told: list[Progress] = []
    out = tmp_path / "out"
    run_text(prepare(path, out), out, CPU, False, told.append, lambda _: None)
    held = [("z-loss",), ("z-loss",), ("z-loss", "score penalty")]
    assert [seen.penalties for seen in told] == held
    assert [one.penalties for one in read_journal(out / "journal.jsonl") if "loss" in one.metrics] == held
    assert "The training loss includes score penalty and z-loss" in (out / "summary.html").read_text()
    plain = tmp_path / "plain"
    run_text(prepare(config(name="plain.toml"), plain), plain, CPU, False, lambda _: None, lambda _: None)
    assert not any(one.penalties for one in read_journal(plain / "journal.jsonl"))
    assert "Nats per token; validation in the second colour." in (plain / "summary.html").read_text()
