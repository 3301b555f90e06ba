"""Interprets the paths on the command line: which are sources, and whether the last path is the output.

`redline upscale IN OUT` works as `redline stream IN OUT` does, but a mistyped source must not be taken for an output.
So the last of several paths is the output only in these cases:

- There are two paths. The last one does not exist, and the first one does.
- There are three or more paths. The last one does not exist and ends in a slash, which means a folder to create. A path
  without a slash and without a suffix is refused, because it could be a mistyped source or a new folder.
- A journal says that an earlier run wrote the last path from one of the other paths. This is checked if the last path
  is a folder, or if there are only two paths.

A single image has no journal. If the second of two existing images is as large as the first one after upscaling, it
could be the output of an earlier run or another source: the command is refused, and the error says how to write both.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.upscale.images.formats import ImageError
from redline.upscale.images.source import open_image
from redline.upscale.journal import NAME


@dataclass(frozen=True)
class Arguments:
    """The sources and the output. If the arguments were ambiguous, `note` says how they were interpreted."""

    sources: tuple[Path, ...]
    out: Path | None
    note: str = ""


def read_arguments(given: Sequence[str], out: Path | None) -> Arguments:
    """Interprets the paths as typed, because a final slash is significant. With `--out`, all paths are sources."""
    paths = tuple(Path(text) for text in given)
    if out is not None or len(paths) < 2:
        return Arguments(paths, out)
    *sources, last = paths
    if (last.is_dir() or (len(paths) == 2 and last.exists())) and any(
        _was_made_from(last, source) for source in sources
    ):
        return Arguments(tuple(sources), last, f"writing to {str(last)!r}: an earlier run wrote it")
    if len(paths) == 2 and sources[0].exists():
        if not last.exists():
            return Arguments(paths[:1], last, f"writing to {str(last)!r}: it does not exist, so it is the output")
        if sources[0].is_file():
            _refuse_possible_output(sources[0], last)
            if last.is_file():
                return Arguments(paths, None, f"{str(last)!r} exists, so it is upscaled too; to write to it, use --out")
    elif len(paths) > 2 and not last.exists():
        if given[-1].endswith((os.sep, "/")):
            return Arguments(tuple(sources), last, f"writing to the folder {str(last)!r}")
        if not last.suffix:
            advice = f"to write to a new folder of that name, type {str(last) + '/'!r} or use --out"
            raise RedlineError(f"there is no file {str(last)!r}; {advice}.")
    return Arguments(paths, None)


def _refuse_possible_output(source: Path, last: Path) -> None:
    """Raises if `last`, or an image in the folder `last`, may be the result of an earlier run on the image `source`."""
    try:
        found = [path for path in last.iterdir() if path.stem == source.stem] if last.is_dir() else [last]
        is_possible = any(_is_enlarged(path, source) for path in found)
    except OSError:  # an unreadable folder is reported later, when it is searched
        return
    if is_possible:
        advice = f"to {'write into' if last.is_dir() else 'overwrite'} it, use --out {shlex.quote(str(last))}"
        raise RedlineError(f"{str(last)!r} exists: {advice}; to upscale both paths, add --out FOLDER.")


def _is_enlarged(image: Path, source: Path) -> bool:
    """Returns whether the size of `image` is the size of `source` times a whole number above 1."""
    try:
        # Reads only headers, without a limit on the size, because the upscaled image may exceed the limit.
        with open_image(source, sys.maxsize) as small, open_image(image, sys.maxsize) as large:
            scale = large.width // small.width
            return scale > 1 and (large.width, large.height) == (scale * small.width, scale * small.height)
    except ImageError:
        return False


def _was_made_from(made: Path, source: Path) -> bool:
    """Returns whether the journal of an earlier run says that `made` was written from `source`.

    For folders, one file in `made` that was written from a file in `source` is enough.
    """
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
            continue  # an incomplete line, which a killed run may leave
        if target.is_relative_to(whole) and noted.is_relative_to(origin):
            return True
    return False
