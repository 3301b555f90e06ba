"""The command line: one file per command, no logic beyond parsing and printing."""

import sys

import typer

from redline.cli.batch_size import batch_size
from redline.cli.bench import bench
from redline.cli.climb import climb
from redline.cli.console import fail
from redline.cli.doctor import doctor
from redline.cli.profile import profile
from redline.cli.report import report
from redline.cli.rungs import rungs
from redline.cli.verify import verify
from redline.errors import RedlineError

app = typer.Typer(
    name="redline",
    help="Runs PyTorch models at the limit of the machine they are on, and proves it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(doctor)
app.command()(climb)
app.command()(verify)
app.command()(report)
app.command()(bench)
app.command()(profile)
app.command("batch-size")(batch_size)
app.command()(rungs)


def main() -> None:
    """Exit codes: 0 done, 1 a regression or a plan that no longer holds, 2 bad input, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except RedlineError as error:
        fail(str(error))
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # what Typer makes of Ctrl-C
            fail("interrupted.")
        raise
