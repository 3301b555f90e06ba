"""Prepares and runs training on text. Everything is checked before anything is written."""

from collections.abc import Callable
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.evaluation.recall.tasks import describe, name_of
from redline.files.atomic import check_can_write
from redline.ladder.batch_size import Probe, search
from redline.machine.ceilings import with_ceilings
from redline.machine.machine import Machine
from redline.notation import format_bytes
from redline.training.checkpoints import FOLDER, Checkpoints, SavedTraining
from redline.training.config_file import ConfigSource
from redline.training.loop import Outcome, Progress, train
from redline.training.tensorboard import WHY_NOT, TensorBoard, is_installed
from redline.training.text.batch_choice import TrainingCase, batch_limit
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.corpus import Corpus, prepare
from redline.training.text.memory_check import check_memory
from redline.training.text.recall_task import RecallTask
from redline.training.text.result import TextResult, write_result
from redline.training.text.sources import Sources
from redline.training.text.talk_task import TalkTask, identity_of_talk, talk_tokenizer
from redline.training.text.task import LanguageTask, TextTask, identity_of_settings, rows_of
from redline.training.text.trained_model import check_machine

Log = Callable[[str], None]


def prepare_training(
    config: ConfigSource,
    out: Path,
    device: torch.device,
    resume: bool,
    status: Log,
    log: Log,
    sources: list[str] | None = None,
    steps: int | None = None,
    minutes: float | None = None,
) -> LanguageTask:
    """Returns the task of a config with its text tokenized. `log` gets messages to keep, `status` gets progress."""
    training = TextTraining.read(config, sources=sources, steps=steps, minutes=minutes)
    check_memory(training, device)
    check_machine(training, device)
    check_can_write(out)
    checkpoints = Checkpoints(out / FOLDER)
    checkpoints.check_start(resume)
    saved = checkpoints.saved_training() if resume else None
    if saved is not None:
        saved.check_matches(identity_of_settings(training))
    if training.recall is not None:
        return _prepare_recall(training, device, saved, status, log)
    if training.data.conversations:
        return _prepare_talk(training, out, device, saved, status, log)
    data = training.data
    found = Sources.find(data.sources, data.text_field, data.separator)
    if found.skipped_message:
        log(found.skipped_message)
    if training.tokenizer.file:
        # Checked now, because tokenizing the text may take a long time.
        training.model.vocabulary_for(training.tokenizer.load().vocabulary)

    def check_is_saved_text(made: Corpus) -> None:
        if saved is not None:
            # The vocabulary comes first, because errors name the first entry that differs: another vocabulary always
            # means other tokens, and it is the better explanation.
            vocabulary = training.model.vocabulary_for(made.tokenizer.vocabulary)
            saved.check_matches({"vocabulary": vocabulary, **made.identity})

    def check(made: Corpus) -> None:
        rows_of(training, made)
        check_is_saved_text(made)

    # If `check` raises, `prepare` deletes the shards that it has made, because this run cannot use them.
    corpus = prepare(found, training.tokenizer, Path(data.shards), status, check)
    check_is_saved_text(corpus)
    vocabulary = training.model.vocabulary_for(corpus.tokenizer.vocabulary)
    rows = rows_of(training, corpus)[0].rows
    task = TextTask(_with_batch(training, vocabulary, device, rows, saved, status, log), corpus, device)
    log(_describe(task, len(corpus.lengths)))
    return task


def _describe(task: TextTask, documents: int) -> str:
    tokens = int(task.rows.lengths.sum())
    held_out = int(task.held_out.lengths.sum()) if task.held_out else 0
    if documents == 1:
        end = f"its last {held_out:,} tokens are" if held_out else "nothing is"
        return f"one document, {tokens:,} tokens for training; {end} held out for validation"
    return (
        f"{len(task.rows.lengths):,} documents, {tokens:,} tokens for training, {held_out:,} held out for validation; "
        f"packed (padding would waste {task.padding_share:.0%})"
    )


def _prepare_recall(
    training: TextTraining, device: torch.device, saved: SavedTraining | None, status: Log, log: Log
) -> RecallTask:
    vocabulary = training.model.vocabulary_for(training.tokenizer.vocabulary)
    task = RecallTask(_with_batch(training, vocabulary, device, None, saved, status, log), device)
    options = ", ".join(f"{name} {value}" for name, value in describe(task.recall).items() if name != "task")
    log(f"{name_of(task.recall)} ({options}), new samples of {training.data.length:,} tokens in every step")
    return task


def _prepare_talk(
    training: TextTraining, out: Path, device: torch.device, saved: SavedTraining | None, status: Log, log: Log
) -> TalkTask:
    status("training a tokenizer on conversations …")
    tokenizer = talk_tokenizer(training.tokenizer, out)
    vocabulary = training.model.vocabulary_for(tokenizer.vocabulary)
    if saved is not None:
        saved.check_matches({"vocabulary": vocabulary, **identity_of_talk(tokenizer)})
    task = TalkTask(_with_batch(training, vocabulary, device, None, saved, status, log), tokenizer, device)
    log(
        f"conversations written by {training.data.workers or 'no'} worker processes, new ones in every step; the loss "
        "counts the assistant's tokens"
    )
    return task


def _with_batch(
    training: TextTraining,
    vocabulary: int,
    device: torch.device,
    rows: int | None,
    saved: SavedTraining | None,
    status: Log,
    log: Log,
) -> TextTraining:
    """Sets the batch size, and the learning rate for it.

    If the config says "auto", a resumed run keeps its batch size, and a new run uses the largest that fits. `rows` is
    the number of rows in the text, or None if samples are generated without end.
    """
    batch = training.data.batch
    if batch == AUTO and saved is not None:
        batch = _saved_batch(training, saved)
    elif batch == AUTO:
        batch = _largest_batch(training, vocabulary, device, rows, status, log)
    assert isinstance(batch, int)
    chosen = training.with_batch(batch)
    if training.loop.rate_scaling != "none":
        per_step = f"{chosen.tokens_per_step:,} tokens per step"
        log(f"learning rate {chosen.loop.learning_rate:.3g} for {per_step} ({training.loop.rate_scaling} scaling)")
    return chosen


def _saved_batch(training: TextTraining, saved: SavedTraining) -> int:
    tokens, row = saved.identity["tokens_per_step"], training.data.length * training.data.accumulate
    if tokens < row or tokens % row:
        raise RedlineError(
            f"{str(saved.path)!r} belongs to another training run: its {tokens:,} tokens per step are not a multiple "
            f"of length × accumulate = {training.data.length:,} × {training.data.accumulate}."
        )
    return tokens // row


def _largest_batch(
    training: TextTraining, vocabulary: int, device: torch.device, rows: int | None, status: Log, log: Log
) -> int:
    def on_probe(probe: Probe) -> None:
        status(f"batch {probe.batch} {'fits' if probe.fits else 'does not fit'}, trying another …")

    limit, why = batch_limit(training, rows)
    case = TrainingCase(training, vocabulary)
    result = search(case, max_batch=limit, device=str(device), on_probe=on_probe)
    reason = {"memory": "a larger batch does not fit", "time": "a larger batch took too long", "max_batch": why}
    used = f"peak memory {format_bytes(result.peak_bytes)} of {format_bytes(result.budget_bytes)}"
    log(f"batch {result.batch}: {used}; {reason[result.stopped_by]}")
    return result.batch


def run_text(
    task: LanguageTask, out: Path, device: torch.device, resume: bool, progress: Callable[[Progress], None], log: Log
) -> tuple[Outcome, TextResult | None]:
    """Trains and writes the result. Returns no result if the run was interrupted."""
    active = task.trained.active(task.optimizer(), task.training)
    ceiling = _ceiling(task, device)
    if ceiling is None:
        active.append("no MFU is shown: run `redline doctor` once to measure the machine's ceilings")
    active.append("TensorBoard log" if is_installed() else WHY_NOT)
    for line in active:
        log(f"· {line}")
    board = TensorBoard(out / "tensorboard", log) if is_installed() else None
    loop = task.training.loop
    try:
        outcome = train(task, loop, out, device, resume, progress, ceiling_flops_per_s=ceiling, board=board)
    finally:
        task.close()
        if board is not None:
            board.close()
    if outcome.interrupted:
        return outcome, None
    if loop.steps is not None and outcome.position.step > loop.steps:
        log(
            f"nothing to train: the checkpoint already has {outcome.position.step:,} steps, and {loop.steps:,} were "
            "asked for"
        )
    try:
        return outcome, write_result(task, outcome, out, active)
    except OSError as error:
        raise RedlineError(
            f"cannot write the result in {str(out)!r}: {error.strerror or error}; the checkpoint is complete: free "
            "some disk space and resume."
        ) from error


def _ceiling(task: LanguageTask, device: torch.device) -> float | None:
    """Returns the measured FLOP/s of matrix products in this precision. On a CPU, uses only an earlier measurement."""
    machine = Machine.detect(str(device))
    ceilings = with_ceilings(machine).ceilings if machine.is_cuda else machine.ceilings
    if machine.is_cuda:
        torch.cuda.empty_cache()
    precision = "tf32" if task.trained.precision == "fp32" and "tf32" in task.trained.plan else task.trained.precision
    return ceilings.matmul_flops_per_s.get(precision) if ceilings else None
