"""`redline.train` trains a model from a config, and writes the weights and a page about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from redline.errors import RedlineError
from redline.machine.machine import resolve_device
from redline.notation import format_megapixels, parse_seconds
from redline.training import loop
from redline.training.bundled import find_config, kind_of
from redline.training.config_file import ConfigSource
from redline.training.loop import Progress

if TYPE_CHECKING:
    from redline.training.model_card import ImageResult
    from redline.training.photos import PhotoTask
    from redline.training.text.result import TextResult

StrPath = str | Path
Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainingResult:
    """How a training run ended, and where its files are.

    `loss` is the last training loss in the log, `figures` the last validation metrics, and `items_per_s` the median
    throughput in `unit`s per second. `output` describes the weights that were written; it is None if the run was
    interrupted by the signal `stop_signal`. Train again with `resume=True` to continue.
    """

    folder: Path
    steps: int
    skipped_steps: int
    elapsed_s: float
    loss: float | None
    figures: dict[str, float]
    items_per_s: float | None
    unit: str
    peak_bytes: int
    output: "TextResult | ImageResult | None"
    stop_signal: int | None = None

    @property
    def interrupted(self) -> bool:
        return self.output is None

    @property
    def model(self) -> Path | None:
        """The model folder of a language model, or the weights file of an image model."""
        return getattr(self.output, "model", None) or getattr(self.output, "weights", None)


def train(
    config: ConfigSource,
    source: StrPath | Sequence[StrPath] | None = None,
    out: StrPath | None = None,
    *,
    steps: int | None = None,
    time: str | None = None,
    resume: bool = False,
    device: str = "auto",
    validation: StrPath | Sequence[StrPath] | None = None,
    start: StrPath | None = None,
    kind: str | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    log: Log = lambda line: None,
    status: Log = lambda line: None,
) -> TrainingResult:
    """Trains a model from a config and writes its weights, a page, checkpoints and a log of its metrics to `out`.

    `config` is the name of a bundled config ("decoder-124m", "drct-small-x4", "lsd-tiny", …), the path of a TOML file,
    or a dict of its tables. `source` replaces the files or folders of text, or the folder of photos, that the config
    names. `steps` or `time` ("12m") replaces its duration. `validation` (folders of images held out for scoring) and
    `start` (initial weights of a DRCT) are for image models.

    `kind` is "text", "drct" or "lsd"; without it, the contents of the config determine the kind. `progress` is called
    with every line of metrics, `log` with messages to keep, and `status` with the current activity. Ctrl-C saves a
    checkpoint and returns; a second one raises KeyboardInterrupt.

    >>> config = {
    ...     "model": {"width": 16, "layers": 2, "heads": 2, "mlp_width": 24, "context": 32},
    ...     "data": {"length": 16, "batch": 2, "validation": 0.1, "shards": "tokens"},
    ...     "tokenizer": {"vocabulary": 270},
    ...     "training": {"warmup_steps": 2},
    ... }
    >>> result = train(config, source="corpus.txt", out="run", steps=4, device="cpu")
    >>> result.steps, sorted(result.figures), str(result.model)
    (4, ['validation_loss'], 'run/model')
    """
    if steps is not None and time is not None:
        raise RedlineError("steps and time (--steps, --time) both set the duration: give one of them.")
    minutes = None if time is None else parse_seconds(time) / 60
    if not isinstance(config, (str, Path)):
        kind, name = kind or kind_of(config), kind or kind_of(config)
    else:
        config, kind = find_config(str(config), kind)
        name = config.stem
    folder = Path(out) if out is not None else Path("redline-out") / "train" / name
    where = torch.device(resolve_device(device))
    sources = _paths(source)
    if kind == "text":
        if validation is not None or start is not None:
            raise RedlineError("validation and start are for image models. For text, set validation under [data].")
        from redline.training.text.run import prepare_training, run_text

        status("reading text …")
        task = prepare_training(config, folder, where, resume, status, log, sources, steps, minutes)
        status("the first steps …")
        return _result(task, folder, *run_text(task, folder, where, resume, progress, log))
    if sources is not None and len(sources) != 1:
        raise RedlineError(f"source must be one folder of photos for an image model, not {len(sources)} folders.")
    options = {"photos": sources and sources[0], "validation": _paths(validation), "steps": steps, "minutes": minutes}
    status("reading photos …")
    task = _image_task(kind, config, where, None if start is None else str(start), options)
    for skipped in task.pairs.skipped:
        log(f"skipped: {skipped}")
    log(f"{task.pairs.photos} photos, {format_megapixels(task.pairs.pixels)}, on {where}, {task.precision}")
    if task.start and not resume:
        log(f"starting from {task.start}")
    status("the first steps …")
    outcome = loop.train(task, task.settings.loop, folder, where, resume, progress)
    if outcome.interrupted:
        return _result(task, folder, outcome, None)
    from redline.training.model_card import write_result

    status("scoring …")
    return _result(task, folder, outcome, write_result(task, outcome, folder))


def _image_task(
    kind: str, config: ConfigSource, device: torch.device, start: str | None, options: dict[str, Any]
) -> "PhotoTask":
    if kind == "drct":
        from redline.training.super_resolution import DrctTask, DrctTraining

        return DrctTask(DrctTraining.read(config, start=start, **options), device)
    if start is not None:
        raise RedlineError("start is for super-resolution models: a live video model starts from random weights.")
    from redline.training.lsd.settings import LsdTraining
    from redline.training.lsd.task import LsdTask

    return LsdTask(LsdTraining.read(config, **options), device)


def _paths(given: StrPath | Sequence[StrPath] | None) -> list[str] | None:
    if given is None or isinstance(given, (str, Path)):
        return None if given is None else [str(given)]
    return [str(path) for path in given] or None


def _result(task: Any, folder: Path, outcome: loop.Outcome, output: Any) -> TrainingResult:
    position = outcome.position
    return TrainingResult(
        folder,
        position.step,
        position.skipped,
        position.elapsed_s,
        outcome.loss,
        outcome.figures,
        outcome.median("items_per_s"),
        task.unit,
        outcome.peak_bytes,
        output,
        outcome.stop_signal,
    )
