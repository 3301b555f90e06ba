"""The command line: one file per command, no logic beyond parsing and printing.

A command's file is imported when the command is called, and torch and other large packages inside the command's
function: no `--help` waits for them.
"""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from redline.cli.console import fail
from redline.cli.signals import TERMINATED, Termination, sigterm_as_interrupt
from redline.errors import RedlineError
from redline.version import VERSION

# What `redline --help` says of each command; a test holds it against the command's own first sentence.
COMMANDS = {
    "doctor": "Say what this machine can do: dtypes, kernels, measured ceilings, and every rung, available or why not.",
    "climb": "Make a model faster, one measured and proven rung at a time.",
    "verify": "Re-measure a plan here; exit code 1 when a rung no longer holds.",
    "report": "Makes one HTML page of a climb's measurements: the ladder, the roofline, the samples, the reasons.",
    "bench": "Measure workloads under plans, interleaved; exit code 1 on a regression beyond the noise.",
    "profile": "Where a step's time and memory go, layer by layer.",
    "batch-size": "Find the largest batch that fits, by doubling and bisection; every batch is really run.",
    "rungs": "List the rungs of the ladder in their order, or the options of one.",
    "upscale": "Enlarge pictures and films, without seams, with their colours, transparency and metadata.",
    "stream": "Transform live video with a diffusion model, a frame or two behind the camera.",
    "generate": "Generate text with a language model.",
    "train": "Train a model from a config file.",
    "eval": "Score a model with the metrics of its field.",
    "export": "Write a network as an ONNX file, held against the network itself before it is kept.",
}


class _Commands(TyperGroup):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name], rich_markup_mode="rich")
        if cmd_name not in self.commands:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def load_command(name: str) -> Any:
    """The command of a name, made from the function of that name in the file of that name."""
    word = name.replace("-", "_")
    function = getattr(import_module(f"redline.cli.{word}"), word)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(**_LOOK)
    single.command(name)(function)
    return typer.main.get_command(single)


# As a shell says of what SIGPIPE ended.
_UNREAD = 141
_LOOK: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(
    **{**_LOOK, "add_completion": True},
    name="redline",
    cls=_Commands,
    help="Runs PyTorch models at the limit of the machine they are on, and proves it.",
    no_args_is_help=True,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _redline(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Runs PyTorch models at the limit of the machine they are on, and proves it."""


def main() -> None:
    """Exit codes: 0 done, 1 a regression or a plan that no longer holds, 2 bad input, 130 interrupted (Ctrl-C), 141
    nobody reads the output, 143 terminated (SIGTERM)."""
    with sigterm_as_interrupt() as termination:
        _main(termination)


def _main(termination: Termination) -> None:
    # Kept apart, because who notices a broken pipe puts another file in the place of stdout.
    output = None
    with suppress(OSError, AttributeError):  # there may be none
        output = os.dup(sys.stdout.fileno())
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(out := sys.stdout, io.TextIOWrapper) and out is sys.__stdout__:
        sys.stdout = _Stdout(
            out.buffer, out.encoding, "replace", line_buffering=out.line_buffering, write_through=out.write_through
        )
    if sys.argv[1:2] == ["stream"]:
        # Before torch is there: its threads are not to spin while they wait, or two programs that compute on the same
        # cores take turns of a second.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.argv[1:2] in (["stream"], ["upscale"]):
        # Likewise: memory in large pages, of which pictures take few, and which fit each other better when kept.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        try:
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except RedlineError as error:
        fail(str(error))
        sys.exit(2)
    except BrokenPipeError:  # met by what was still to be printed at the end
        _print_nothing_more()
        sys.exit(_UNREAD)
    except SystemExit as end:
        if end.code in (130, TERMINATED):  # 130 is Typer's exit code for KeyboardInterrupt
            terminated = termination.requested or end.code == TERMINATED
            fail("terminated." if terminated else "interrupted.")
            sys.exit(TERMINATED if terminated else 130)
        if end.code == 1 and output is not None and not _has_reader(output):
            sys.exit(_UNREAD)
        raise


class _Stdout(io.TextIOWrapper):
    """Where a disk that is full is a sentence; a reader who has left is what it was."""

    def write(self, text: str, /) -> int:
        with self._said():
            return super().write(text)

    def flush(self) -> None:
        with self._said():
            super().flush()

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            _print_nothing_more()
            raise RedlineError(f"the output cannot be written: {error.strerror}.") from error


def _print_nothing_more() -> None:
    """What could not be printed is not tried again at the end of the process, where nobody could say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
