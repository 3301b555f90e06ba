"""Lists the files of a folder and its subfolders; follows symlinks to folders, but not in circles."""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Found:
    """Files with the wanted suffixes, other files, unreadable folders with the error, and links to a parent folder."""

    files: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    circles: list[Path] = field(default_factory=list)


def search(folder: Path, endings: Collection[str], leave_out: Path) -> Found:
    """Returns files sorted by name, those of a folder before those of its subfolders.

    Skips hidden files and folders, and the folder `leave_out`, which holds the results.
    """
    found, leave_out = Found(), leave_out.resolve()
    above: dict[Path, tuple[Path, ...]] = {
        folder: (folder.resolve(),)
    }  # each folder with itself and its parents, resolved

    def note_unreadable(error: OSError) -> None:
        path = Path(error.filename)
        found.unreadable.append((path, f"cannot read the folder {str(path)!r}: {error.strerror or error}."))

    for here, folders, files in os.walk(folder, onerror=note_unreadable, followlinks=True):
        visible = [Path(here, name) for name in sorted(files) if not name.startswith(".")]
        found.files += [path for path in visible if path.suffix.lower() in endings]
        found.others += [path for path in visible if path.suffix.lower() not in endings]
        inside = {name: Path(here, name) for name in sorted(folders) if not name.startswith(".")}
        for name, path in list(inside.items()):
            whole, parents = path.resolve(), above[Path(here)]
            if whole == leave_out or whole in parents:
                del inside[name]
                found.circles += [path] * (whole != leave_out)
            above[path] = (*parents, whole)
        folders[:] = inside  # `os.walk` descends into these
    return found
