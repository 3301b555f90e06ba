"""What is to be done: which pictures and films the given paths mean, and where each result goes."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.upscale.pictures import FORMATS, format_for, is_partial

_FILMS = {
    ".mp4",
    ".m4v",
    ".mov",
    ".mkv",
    ".webm",
    ".avi",
    ".mpg",
    ".mpeg",
    ".ts",
    ".m2ts",
    ".mts",
    ".wmv",
    ".flv",
    ".3gp",
    ".ogv",
}
_PICTURES = {suffix for form in FORMATS.values() for suffix in form.suffixes} | {".gif"}
# Where a result of the same kind cannot be written, it becomes the nearest kind that can.
_INSTEAD = {".gif": ".png", ".avi": ".mkv", ".mpg": ".mkv", ".mpeg": ".mkv", ".ts": ".mkv", ".m2ts": ".mkv",
            ".mts": ".mkv", ".wmv": ".mkv", ".flv": ".mkv", ".3gp": ".mp4", ".ogv": ".mkv"}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One picture or film to enlarge, and where it goes."""

    source: Path
    target: Path

    @property
    def is_film(self) -> bool:
        return self.source.suffix.lower() in _FILMS


def find_tasks(sources: Sequence[Path], target: Path | None, scale: int, format: str | None = None) -> list[Task]:
    """A file becomes a file, a folder a folder of the same structure; without a target they lie beside the sources."""
    writable = [name for name, form in FORMATS.items() if form.writable]
    if format is not None and format not in writable:
        raise RedlineError(f"{format!r} is no format that can be written: choose {', '.join(writable)}.")
    tasks: list[Task] = []
    for source in sources:
        if source.is_dir():
            folder = target or source.resolve().parent / f"{source.resolve().name}-x{scale}"
            inside = [
                Task(path, folder / _renamed(path.relative_to(source), "", format)) for path in _walk(source, folder)
            ]
            if not inside:
                raise RedlineError(f"there is no picture and no film in the folder {str(source)!r}.")
            tasks += inside
        elif not source.exists():
            raise RedlineError(f"there is no file {str(source)!r}.")
        elif target is None:
            tasks.append(Task(source, source.parent / _renamed(Path(source.name), f"-x{scale}", format)))
        elif len(sources) > 1 or _means_folder(target):
            tasks.append(Task(source, target / _renamed(Path(source.name), "", format)))
        else:
            tasks.append(Task(source, target))
    _refuse_twice(tasks)
    for task in tasks:
        if not task.is_film:
            format_for(task.target)  # an ending that names no format is said before anything is done
    return tasks


def _walk(folder: Path, leave_out: Path) -> Iterable[Path]:
    """The folder's pictures and films in a steady order, without hidden ones and without what we put there."""
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and (here / f).resolve() != leave_out.resolve())
        for name in sorted(files):
            path = here / name
            known = path.suffix.lower() in _PICTURES | _FILMS
            if known and not name.startswith(".") and not is_partial(path):
                yield path


def _means_folder(target: Path) -> bool:
    return target.is_dir() or not target.suffix


def _renamed(path: Path, addition: str, format: str | None) -> Path:
    suffix = path.suffix
    if format is not None and suffix.lower() not in _FILMS:
        suffix = FORMATS[format].suffixes[0]
    return path.with_name(path.stem + addition + _INSTEAD.get(suffix.lower(), suffix))


def _refuse_twice(tasks: Sequence[Task]) -> None:
    """`a.png` and `a.jpg` would both become `a.png`: nothing is overwritten by its neighbour."""
    seen: dict[Path, Path] = {}
    for task in tasks:
        if task.target in seen:
            raise RedlineError(
                f"{str(seen[task.target])!r} and {str(task.source)!r} would both become {str(task.target)!r}."
            )
        seen[task.target] = task.source
