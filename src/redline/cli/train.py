"""`redline train`: trains a model from a config.

`redline train CONFIG` trains a language model; other kinds of model have a subcommand of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from redline.cli.console import warnings_as_sentences
from redline.cli.train_progress import run_training
from redline.cli.train_results import print_drct, print_lsd, print_text

CONFIG_HELP = "A config file, or the name of a bundled config"
Out = Annotated[Path | None, typer.Option(help="Folder for the result, checkpoints and log.")]
Photos = Annotated[str | None, typer.Option(help="Folder of photos to train on (overrides the config).")]
Validation = Annotated[
    list[str] | None, typer.Option(help="Folder of held-out images to score on (overrides the config); repeatable.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in the folder.")]
Steps = Annotated[int | None, typer.Option(help="Train for this many steps (overrides the config).")]
Time = Annotated[
    str | None, typer.Option("--time", help="Train for this long, for example 12m (overrides the config).")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class _TextByDefault(TyperGroup):
    """Runs the command `text` if the first word is not a command but a config."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["text", *args]
        return super().parse_args(ctx, args)


train = typer.Typer(
    cls=_TextByDefault,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@train.callback()
def _train(context: typer.Context) -> None:
    """Train a model from a config file.

    Example: redline train mine.toml --source corpus
    """
    context.with_resource(warnings_as_sentences())


@train.command("text")
def train_text(
    config: Annotated[str, typer.Argument(help=f"{CONFIG_HELP}: decoder-tiny, recall-mqar, …")],
    out: Out = None,
    source: Annotated[
        list[str] | None, typer.Option(help="File or folder of text to train on (overrides the config); repeatable.")
    ] = None,
    resume: Resume = False,
    steps: Steps = None,
    time_limit: Time = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a language model on text; Ctrl-C saves a checkpoint. The word "text" may be left out.

    Example: redline train text decoder-tiny --source corpus --out tiny, or in short: redline train mine.toml
    """
    given = {"--source": source or [], "--steps": [steps], "--time": [time_limit]}
    result = run_training("text", config, out, resume, device, given, source=source, steps=steps, time=time_limit)
    print_text(result, as_json)


@train.command("drct")
def train_drct(
    config: Annotated[str, typer.Argument(help=f"{CONFIG_HELP}: drct-small-x4, drct-small-x2.")],
    out: Out = None,
    photos: Photos = None,
    validation: Validation = None,
    start: Annotated[
        str | None, typer.Option(help="Initial weights: a DRCT of the same dimensions, of any scale.")
    ] = None,
    resume: Resume = False,
    steps: Steps = None,
    time_limit: Time = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a DRCT super-resolution model on a folder of photos; Ctrl-C saves a checkpoint.

    Example: redline train drct drct-small-x4 --photos photos --validation Set5 --out small-x4
    """
    given = {"--photos": [photos], "--validation": validation or [], "--start": [start]}
    given |= {"--steps": [steps], "--time": [time_limit]}
    options: dict[str, Any] = {"source": photos, "validation": validation, "start": start}
    result = run_training("drct", config, out, resume, device, given, steps=steps, time=time_limit, **options)
    print_drct(result, as_json)


@train.command("lsd")
def train_lsd(
    config: Annotated[str, typer.Argument(help=f"{CONFIG_HELP}: lsd-tiny.")],
    out: Out = None,
    photos: Photos = None,
    validation: Validation = None,
    resume: Resume = False,
    steps: Steps = None,
    time_limit: Time = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a live video model on clips made from a folder of photos; Ctrl-C saves a checkpoint.

    Example: redline train lsd lsd-tiny --photos photos --validation held-out --out tiny
    """
    given = {"--photos": [photos], "--validation": validation or [], "--steps": [steps], "--time": [time_limit]}
    options: dict[str, Any] = {"source": photos, "validation": validation}
    result = run_training("lsd", config, out, resume, device, given, steps=steps, time=time_limit, **options)
    print_lsd(result, as_json)
