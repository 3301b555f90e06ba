"""The command line: one file per command, for parsing and printing only.

A command's file is imported when the command is called; torch and other large packages are imported in the command's
function, so that `--help` does not wait for them.
"""

import io
import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from redline.cli.console import fail
from redline.cli.signals import TERMINATED, Termination, sigterm_as_interrupt
from redline.errors import RedlineError
from redline.machine.version import VERSION

# The summary of each command in `redline --help`; a test compares it with the first sentence of the command's help.
COMMANDS = {
    "doctor": "Show what this machine supports: dtypes, kernels, measured ceilings, and which rungs can run.",
    "climb": "Make a model faster, one measured and proven rung at a time.",
    "verify": "Measure a plan again on this machine; exit code 1 if a rung fails or no longer gains anything.",
    "report": "Write the measurements of a climb as one HTML page, with the ladder, the plots and the reasons.",
    "bench": "Measure workloads under plans, interleaved; exit code 1 on a regression beyond the noise.",
    "profile": "Show the time and memory of a step, layer by layer.",
    "batch-size": "Find the largest batch size that fits in memory: double it until a step does not fit, then bisect.",
    "rungs": "List the rungs of the ladder in their order, or show the options of one.",
    "upscale": "Upscale images and videos without visible seams; colours, transparency and metadata are kept.",
    "stream": "Transform live video with a diffusion model, a frame or two behind the camera.",
    "generate": "Generate text with a language model.",
    "serve": "Serve a language model with the OpenAI API.",
    "chat": "Chat with a language model, of this machine or of a server.",
    "train": "Train a model from a config file.",
    "eval": "Score a model with the metrics of its field.",
    "export": "Export a model with its plan as a file or folder that loads in seconds, checked before it is written.",
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # The arguments of `bench` are workloads, so `bench serve` cannot be a command of a group.
        if args[:2] == ["bench", "serve"]:
            return "bench serve", load_command("bench-serve"), args[2:]
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def load_command(name: str) -> Any:
    """Returns the command: the function `name` in the file `name`.py."""
    word = name.replace("-", "_")
    function = getattr(import_module(f"redline.cli.{word}"), word)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(**LOOK)
    single.command(name)(function)
    return typer.main.get_command(single)


# The exit code that a shell reports for a process that was killed by SIGPIPE.
_BROKEN_PIPE = 141
LOOK: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(
    **dict[str, Any]({**LOOK, "add_completion": True}),
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
        bool, Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    show_traceback: Annotated[
        bool,
        Option("--traceback", help="On an error, also print the traceback, which shows where your own code failed."),
    ] = False,
) -> None:
    """Runs PyTorch models at the limit of the machine they are on, and proves it."""


def main() -> None:
    """Runs the command line.

    Exit codes: 0 done, 1 a regression or a plan that no longer holds, 2 bad input, 130 interrupted (Ctrl-C), 141 broken
    pipe, 143 terminated (SIGTERM).
    """
    with sigterm_as_interrupt() as termination:
        _main(termination)


def _main(termination: Termination) -> None:
    # Duplicates the file descriptor, because stdout is replaced when its pipe is broken.
    output = None
    with suppress(OSError, AttributeError):  # stdout may be closed
        output = os.dup(sys.stdout.fileno())
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # pyrefly: ignore[missing-attribute]
    if isinstance(out := sys.stdout, io.TextIOWrapper) and out is sys.__stdout__:
        sys.stdout = _Stdout(
            out.buffer, out.encoding, "replace", line_buffering=out.line_buffering, write_through=out.write_through
        )
    if sys.argv[1:2] == ["stream"]:
        # Set before torch is imported, so that waiting threads sleep; spinning would slow down other programs.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.argv[1:2] in (["stream"], ["upscale"]):
        # Also set before torch is imported: large pages make allocating and reusing image buffers faster.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # `--traceback` is also accepted after the command.
    show_traceback = "--traceback" in sys.argv
    sys.argv[1:] = [*["--traceback"] * show_traceback, *(word for word in sys.argv[1:] if word != "--traceback")]
    try:
        try:
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except RedlineError as error:
        if show_traceback:
            _print_traceback(error)
        fail(str(error))
        sys.exit(2)
    except BrokenPipeError:  # raised by the last flush
        _discard_output()
        sys.exit(_BROKEN_PIPE)
    except SystemExit as end:
        if end.code in (130, TERMINATED):  # 130 is Typer's exit code for KeyboardInterrupt
            terminated = termination.requested or end.code == TERMINATED
            fail("terminated." if terminated else "interrupted.")
            sys.exit(TERMINATED if terminated else 130)
        if end.code == 1 and output is not None and not _has_reader(output):
            sys.exit(_BROKEN_PIPE)
        raise


def _print_traceback(error: BaseException) -> None:
    """Prints the traceback of the first cause, and the trial process's traceback if the error occurred there."""
    while error.__cause__ is not None:
        error = error.__cause__
    traceback.print_exception(error)


class _Stdout(io.TextIOWrapper):
    """Raises `RedlineError` if the output cannot be written (disk full); a broken pipe stays a `BrokenPipeError`."""

    def write(self, text: str, /) -> int:
        with self._reported():
            return super().write(text)

    def flush(self) -> None:
        with self._reported():
            super().flush()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            _discard_output()
            raise RedlineError(f"the output cannot be written: {error.strerror}.") from error


def _discard_output() -> None:
    """Redirects stdout to /dev/null, so that the flush at the end of the process does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
