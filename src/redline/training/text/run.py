"""A training on text from its settings to its result: everything is checked before anything is written."""

from collections.abc import Callable
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.evaluation.recall.tasks import describe, name_of
from redline.files.atomic import check_can_write
from redline.ladder.batch_size import Probe
from redline.machine.ceilings import with_ceilings
from redline.machine.machine import Machine
from redline.notation import format_bytes
from redline.training.checkpoints import FOLDER, Checkpoints, Held
from redline.training.loop import Outcome, Progress, train, unrecorded
from redline.training.tensorboard import WHY_NOT, TensorBoard, is_installed
from redline.training.text.batch_choice import find_batch, largest_tried
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.corpus import Corpus, prepare
from redline.training.text.language_task import LanguageTask, identity_of_settings
from redline.training.text.recall_task import RecallTask
from redline.training.text.result import TextResult, write_result
from redline.training.text.room import check_room
from redline.training.text.sources import Sources
from redline.training.text.task import TextTask, rows_of
from redline.training.text.trainee import check_machine

Say = Callable[[str], None]


def prepare_training(
    config: Path,
    out: Path,
    device: torch.device,
    resume: bool,
    update: Say,
    say: Say,
    sources: list[str] | None = None,
    steps: int | None = None,
    minutes: float | None = None,
) -> LanguageTask:
    """The task of a settings file, its text tokenized; `update` hears of progress, `say` of what is worth keeping."""
    training = TextTraining.read(config, sources=sources, steps=steps, minutes=minutes)
    check_room(training, device)
    check_machine(training, device)
    check_can_write(out)
    checkpoints = Checkpoints(out / FOLDER).files()
    if resume and not checkpoints:
        raise RedlineError(f"there is no checkpoint in {str(out / FOLDER)!r} to resume from.")
    if checkpoints and not resume:
        raise RedlineError(f"{str(out)!r} holds a training already: resume it, or choose another folder.")
    held = Checkpoints(out / FOLDER).held() if resume else None
    if held is not None:
        held.check_is_of(identity_of_settings(training))
    if training.recall is not None:
        return _prepare_recall(training, device, held, update, say)
    data = training.data
    found = Sources.find(data.sources, data.text_field, data.separator)
    if found.remark:
        say(found.remark)
    if training.tokenizer.file:
        # A model that cannot hold its tokens is better known before the text is turned into them.
        training.model.vocabulary_for(training.tokenizer.load().vocabulary)

    def check_is_the_text(made: Corpus) -> None:
        if held is not None:
            # Another vocabulary makes another text of the same letters: that is the word to say.
            vocabulary = training.model.vocabulary_for(made.tokenizer.vocabulary)
            held.check_is_of({"vocabulary": vocabulary, **made.identity})

    def check(made: Corpus) -> None:
        rows_of(training, made)
        check_is_the_text(made)

    # Shards of a text that this training cannot use are not left behind.
    corpus = prepare(found, training.tokenizer, Path(data.shards), update, check)
    check_is_the_text(corpus)
    vocabulary = training.model.vocabulary_for(corpus.tokenizer.vocabulary)
    rows = rows_of(training, corpus)[0].rows
    batch = _batch_before(training, held) or _batch(training, vocabulary, device, rows, update, say)
    training = _with_batch(training, batch, say)
    task = TextTask(training, corpus, device)
    say(_about(task, len(corpus.lengths)))
    return task


def _about(task: TextTask, documents: int) -> str:
    tokens = int(task.rows.lengths.sum())
    if documents == 1:
        end = f"its end, {int(task.kept.lengths.sum()):,} more, is" if task.kept else "nothing is"
        return f"one document, {tokens:,} tokens; {end} kept for validation"
    kept = f"{int(task.kept.lengths.sum()):,} tokens more" if task.kept else "nothing"
    return (
        f"{len(task.rows.lengths):,} documents, {tokens:,} tokens, {kept} kept for "
        f"validation; packed, where padding would waste {task.padding_share:.0%}"
    )


def _prepare_recall(
    training: TextTraining, device: torch.device, held: Held | None, update: Say, say: Say
) -> RecallTask:
    vocabulary = training.model.vocabulary_for(training.tokenizer.vocabulary)
    batch = _batch_before(training, held) or _batch(training, vocabulary, device, None, update, say)
    task = RecallTask(_with_batch(training, batch, say), device)
    options = ", ".join(f"{name} {value}" for name, value in describe(task.recall).items() if name != "task")
    say(f"{name_of(task.recall)} ({options}), fresh samples of {training.data.length:,} tokens in every step")
    return task


def _with_batch(training: TextTraining, batch: int, say: Say) -> TextTraining:
    chosen = training.with_batch(batch)
    if training.loop.rate_scaling != "none":
        per_step = f"{chosen.tokens_per_step:,} tokens a step"
        say(f"learning rate {chosen.loop.learning_rate:.3g} for {per_step} ({training.loop.rate_scaling} scaling)")
    return chosen


def _batch_before(training: TextTraining, held: Held | None) -> int | None:
    """The batch that was found when the training began: another one would make it another training."""
    if held is None or training.data.batch != AUTO:
        return None
    tokens, row = held.identity["tokens_per_step"], training.data.length * training.data.accumulate
    if tokens < row or tokens % row:
        raise RedlineError(
            f"{str(held.path)!r} is of another training: its steps of {tokens:,} tokens are no whole number of rows of "
            f"{training.data.length:,} times accumulate = {training.data.accumulate}."
        )
    return tokens // row


def _batch(
    training: TextTraining, vocabulary: int, device: torch.device, rows: int | None, update: Say, say: Say
) -> int:
    """The settings', or one that is looked for; `rows` is how many the text has, where it has an end."""
    batch = training.data.batch
    if batch != AUTO:
        assert isinstance(batch, int)
        return batch

    def tell(probe: Probe) -> None:
        update(f"batch {probe.batch} {'fits' if probe.fits else 'does not fit'}, trying another …")

    most, why = largest_tried(training, rows)
    result = find_batch(training, vocabulary, device, tell, most)
    limit = {"memory": "a larger one does not fit", "time": "a larger one took too long to try", "max_batch": why}
    used = f"{format_bytes(result.peak_bytes)} of {format_bytes(result.budget_bytes)} at its peak"
    say(f"batch {result.batch}: {used}; {limit[result.stopped_by]}")
    return result.batch


def run_text(
    task: LanguageTask, out: Path, device: torch.device, resume: bool, tell: Callable[[Progress], None], say: Say
) -> tuple[Outcome, TextResult | None]:
    """Trains and writes what came out; no result when it was stopped before its end."""
    active = task.trainee.active(task.optimizer(), task.training)
    ceiling = _ceiling(task, device)
    if ceiling is None:
        active.append("no share of the machine's ceiling is shown: `redline doctor` measures it")
    active.append("figures for TensorBoard" if is_installed() else WHY_NOT)
    for line in active:
        say(f"· {line}")
    board = TensorBoard(out / "tensorboard", say) if is_installed() else None
    loop = task.training.loop
    record = board.behind if board is not None else unrecorded
    try:
        outcome = train(task, loop, out, device, resume, tell, ceiling_flops_per_s=ceiling, record=record)
    finally:
        if board is not None:
            board.close()
    if outcome.interrupted:
        return outcome, None
    if loop.steps is not None and outcome.position.step > loop.steps:
        say(f"it had {outcome.position.step:,} steps already, more than the {loop.steps:,} asked for: none was added")
    try:
        return outcome, write_result(task, outcome, out, active)
    except OSError as error:
        raise RedlineError(
            f"cannot write the result in {str(out)!r}: {error.strerror or error}; its checkpoint is whole: make room "
            "and resume it."
        ) from error


def _ceiling(task: LanguageTask, device: torch.device) -> float | None:
    """What the machine reached in products of this precision; a CPU, where that takes longer, is not measured here."""
    machine = Machine.detect(str(device))
    ceilings = with_ceilings(machine).ceilings if machine.is_cuda else machine.ceilings
    if machine.is_cuda:
        torch.cuda.empty_cache()
    precision = "tf32" if task.trainee.precision == "fp32" and "tf32" in task.trainee.plan else task.trainee.precision
    return ceilings.matmul_flops_per_s.get(precision) if ceilings else None
