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
    found = Found()
    _search(folder, endings, leave_out.resolve(), (), found)
    return found


def _search(folder: Path, endings: Collection[str], leave_out: Path, above: tuple[Path, ...], found: Found) -> None:
    here = folder.resolve()
    if here in above:
        found.circles.append(folder)
        return
    try:
        with os.scandir(folder) as entries:
            inside = sorted((entry.name, _is_folder(entry)) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        found.unreadable.append((folder, f"cannot read the folder {str(folder)!r}: {error.strerror or error}."))
        return
    files = [folder / name for name, is_folder in inside if not is_folder]
    wanted = [path for path in files if path.suffix.lower() in endings]
    found.files += wanted
    found.others += [path for path in files if path.suffix.lower() not in endings]
    for below in (folder / name for name, is_folder in inside if is_folder):
        if below.resolve() != leave_out:
            _search(below, endings, leave_out, (*above, here), found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a symlink into an unreadable folder: opening it reports the error
