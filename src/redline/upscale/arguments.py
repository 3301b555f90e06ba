"""What the paths on the command line mean: which are sources, and whether the last one is the output.

`redline upscale IN OUT` works as `redline stream IN OUT` does, but a mistyped source must not become an output that
nobody asked for. So the last of several arguments is the output only if it is safe to say so:

- of two, if it does not exist and the first does, or if an earlier run wrote it from the first;
- of three or more, if it does not exist and ends in a slash: a folder to be made. One without a slash and without an
  ending is refused, because it could be either.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.upscale.journal import NAME


@dataclass(frozen=True)
class Arguments:
    """`note` says how the arguments were understood, where there was a choice."""

    sources: tuple[Path, ...]
    out: Path | None
    note: str = ""


def read_arguments(given: Sequence[str], out: Path | None) -> Arguments:
    """`given` as typed: a slash at the end of a path counts. With `--out`, all of them are sources."""
    paths = tuple(Path(text) for text in given)
    if out is not None or len(paths) < 2:
        return Arguments(paths, out)
    *sources, last = paths
    if len(paths) == 2 and sources[0].exists():
        if not last.exists():
            return Arguments(paths[:1], last, f"writing to {str(last)!r}: it does not exist, so it is the output")
        if _was_made_from(last, sources[0]):
            return Arguments(paths[:1], last, f"writing to {str(last)!r}: an earlier run made it from the first path")
        if sources[0].is_file() and last.is_file():
            return Arguments(paths, None, f"{str(last)!r} exists, so it is enlarged too; to write to it, use --out")
    elif len(paths) > 2 and not last.exists():
        if given[-1].endswith((os.sep, "/")):
            return Arguments(tuple(sources), last, f"writing to the folder {str(last)!r}")
        if not last.suffix:
            raise RedlineError(
                f"there is no file {str(last)!r}; to write to a new folder of that name, type {str(last) + '/'!r} or "
                "use --out."
            )
    return Arguments(paths, None)


def _was_made_from(made: Path, source: Path) -> bool:
    """Whether the journal of an earlier run says so; of folders, of a file in one and a file in the other."""
    journal = (made if made.is_dir() else made.parent) / NAME
    whole, origin = made.resolve(), source.resolve()
    try:
        lines = journal.read_bytes().splitlines()
    except OSError:
        return False
    for line in lines:
        try:
            entry = json.loads(line)
            target, noted = Path(entry["target"]), Path(entry["source"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a line that a killed run left half written
        if target.is_relative_to(whole) and noted.is_relative_to(origin):
            return True
    return False
