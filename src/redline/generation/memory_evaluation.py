"""`redline.evaluate_memory`: measures a language model's recall, and the bytes of its state, as the text grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.errors import ModelError, RedlineError
from redline.evaluation.recall import LossRow, Recall, RecallRow, evaluate, loss_by_position, make_task, task_in
from redline.evaluation.recall.evaluate import check_counts, check_tasks
from redline.evaluation.recall.page import render_recall_page
from redline.evaluation.recall.passkey import KINDS
from redline.evaluation.recall.tasks import SYMBOLIC, name_of
from redline.generation.folder import ModelFolder, check_architecture, find_model, read_config
from redline.generation.planned import choose_load_options
from redline.machine.machine import Machine, resolve_device

_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_PRECISIONS = ("auto", "fp32", "bf16", "fp16")
Log = Callable[[str], None]


@dataclass(frozen=True)
class MemoryEvaluation:
    """The results: `recall` has a row for each task and length, `loss` has a row for each range of positions."""

    model: str
    about: str
    recall: list[RecallRow]
    loss: list[LossRow]

    def to_html(self) -> str:
        """Returns an HTML page with the curves of recall and loss."""
        return render_recall_page(self.model, self.about, self.recall, self.loss)


def evaluate_memory(
    model: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    samples: int = 64,
    batch: int | None = None,
    text: str | Path | None = None,
    seed: int = 0,
    precision: str = "auto",
    device: str = "auto",
    strict: bool = False,
    log: Log = lambda line: None,
    status: Log = lambda line: None,
) -> MemoryEvaluation:
    """Measures the recall of a model at several text lengths, and the loss of a text by position.

    `tasks` can contain mqar, needle, passkey, number and word. The default is the recall task that the model was
    trained on, or all text tasks if there is none. With an empty list, only the loss of the file `text` is measured.
    Each row of the result is measured on `samples` texts of one of the `lengths` (in tokens). `log` is called with
    messages worth keeping, `status` with the current progress.

    >>> result = evaluate_memory("my-model", tasks=["word"], lengths=[150], samples=2, device="cpu")
    >>> [(row.task, row.length, row.asked) for row in result.recall]
    [('word', 150, 2)]
    """
    if precision not in _PRECISIONS:
        raise RedlineError(f"unknown precision {precision!r}: use one of {', '.join(_PRECISIONS)}.")
    check_counts(samples, batch, seed)
    folder, trained_task = _open(model)
    chosen = _choose_tasks(tasks, trained_task, folder)
    if not chosen and text is None:
        raise RedlineError("nothing to evaluate: give a task, or a text for the loss by position.")
    content = None if text is None else _read_text(Path(text), folder)
    where = torch.device(resolve_device(device))
    dtype = choose_load_options(Machine.detect(str(where)), precision).dtype
    status("reading the model …")
    loaded: Any = folder.load(dtype, where, strict)
    sizes, message = _fitting_lengths(lengths, loaded.context)
    check_tasks(loaded, chosen, sizes, folder.tokenizer)
    if message:
        log(message)
    rows = evaluate(loaded, chosen, sizes, samples, batch, where, folder.tokenizer, seed, status)
    losses = []
    if content is not None:
        tokens = folder.tokenizer.encode(content).ids
        losses = loss_by_position(loaded, tokens, max(sizes), samples, where, status)
    parameters = sum(weight.numel() for weight in loaded.parameters())
    about = f"{parameters / 1e6:,.4g}M parameters · {where} · {str(dtype).removeprefix('torch.')} · torch"
    return MemoryEvaluation(_name(model, folder), f"{about} {torch.__version__}", rows, losses)


def _name(model: str | Path, folder: ModelFolder) -> str:
    place = folder.path.resolve()
    # A training run writes its model to RUN/model; a snapshot folder in the Hugging Face cache is named after its
    # commit.
    if place.name == "model":
        return place.parent.name
    return place.name if Path(model).is_dir() else str(model)


def _open(model: str | Path) -> tuple[ModelFolder, Recall | None]:
    """Returns a model's folder and its recall task, if any. Models trained on symbolic tasks have no tokenizer."""
    path = find_model(model)
    config = read_config(path)
    is_text = (path / "tokenizer.json").exists()
    folder = ModelFolder.open(path) if is_text else ModelFolder(path, check_architecture(path, config), None, 0, ())
    return folder, task_in(config)


def _choose_tasks(names: Sequence[str] | None, trained: Recall | None, folder: ModelFolder) -> list[Recall]:
    where = repr(str(folder.path))
    if names is None:
        if trained is not None:
            return [trained]
        if folder.tokenizer is None:
            raise RedlineError(f"{where} has no tokenizer.json and was trained on no recall task.")
        return [make_task(name) for name in KINDS]
    found = []
    for name in dict.fromkeys(names):
        if trained is not None and name_of(trained) == name:
            found.append(trained)
            continue
        found.append(make_task(name))
        if name in SYMBOLIC:
            raise RedlineError(f"{where} was not trained on {name}, whose symbols have no meaning to other models.")
        if folder.tokenizer is None:
            raise RedlineError(f"the task {name} needs a tokenizer, and {where} has no tokenizer.json.")
    return found


def _fitting_lengths(given: Sequence[int] | None, context: int | None) -> tuple[list[int], str]:
    """Returns the lengths that fit into the context, and a message about those that do not."""
    lengths = sorted(set(given or _LENGTHS))
    fitting = [length for length in lengths if context is None or length <= context]
    skipped = ", ".join(f"{length:,}" for length in lengths if length not in fitting)
    if not given:
        message = f"the model's context is {context:,} tokens: longer texts are skipped" if skipped else ""
        return fitting or [context or _LENGTHS[0]], message
    if not fitting:
        raise RedlineError(f"no length fits into the model's context of {context:,} tokens: {skipped}.")
    return fitting, f"skipped lengths beyond the model's context of {context:,} tokens: {skipped}" if skipped else ""


def _read_text(path: Path, folder: ModelFolder) -> str:
    if folder.tokenizer is None:
        raise ModelError(f"the loss of a text needs a tokenizer, and {str(folder.path)!r} has no tokenizer.json.")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RedlineError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"{str(path)!r} is not UTF-8 text.") from error
