"""Turns the given paths into tasks, one per image or video; defines their outcome and the callbacks of a run."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from redline.errors import RedlineError
from redline.upscale.images.formats import FORMATS, ImageError, UnsupportedImage, format_for
from redline.upscale.images.source import sniffed
from redline.upscale.video.probe import probe
from redline.upscale.video.settings import TARGETS, VideoProgress

# Videos in a folder are recognised by suffix. A file given by name is opened to detect its type.
_VIDEO_SUFFIXES = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".mts", ".wmv",
                   ".flv", ".3gp", ".ogv", ".vob", ".asf", ".mxf", ".f4v", ".dv", ".y4m", ".nut", ".rm",
                   ".divx"}  # fmt: skip
_IMAGE_SUFFIXES = {suffix for form in FORMATS.values() for suffix in form.suffixes}
# The suffix of the result for formats that are read but not written.
_INSTEAD = {suffix: ".png" for form in FORMATS.values() if not form.writable for suffix in form.suffixes}


_INSTEAD |= {".3gp": ".mp4", ".f4v": ".mp4"}
_VIDEO_FALLBACK_SUFFIX = ".mkv"
# The maximum number of skipped files that a message names.
_NAMED = 10
# The names of FFmpeg's demuxers for still images and text.
_STILLS = ("_pipe", "image2", "tty")


@dataclass(frozen=True)
class Task:
    """An image or video and the path of its result. `problem` says why it cannot be upscaled, if that is known."""

    source: Path
    target: Path
    problem: str = field(default="", kw_only=True)

    @property
    def is_video(self) -> bool:
        known = self.source.suffix.lower()
        return known in _VIDEO_SUFFIXES or (known not in _IMAGE_SUFFIXES and self.target.suffix.lower() in TARGETS)

    def source_state(self) -> tuple[int, int] | None:
        """Returns the size and modification time of the source, or None if it does not exist."""
        try:
            status = self.source.stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Outcome:
    """The result for one file: its size and notes, or why it failed.

    `source_state` is the size and modification time of the source when it was opened.
    """

    task: Task
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: str = ""
    skipped: bool = False
    source_state: tuple[int, int] | None = None


@dataclass(frozen=True)
class Listener:
    """The callbacks of a run; any thread may call them.

    `started` receives all tasks, `say` a message, `finished` the outcome of a file, `image_progress` the finished and
    the total number of rows of tiles of an image, and `video_progress` the progress of a video.
    """

    say: Callable[[str], None] = lambda _text: None
    finished: Callable[[Outcome], None] = lambda _outcome: None
    image_progress: Callable[[Task, float, int], None] = lambda _task, _rows, _total: None
    video_progress: Callable[[Task, VideoProgress], None] = lambda _task, _progress: None
    started: Callable[[Sequence[Task]], None] = lambda _tasks: None


def find_tasks(
    sources: Sequence[Path],
    target: Path | None,
    scale: int,
    format: str | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> list[Task]:
    """Returns the tasks for files and folders. Without a target, results are written beside the sources.

    The result of a folder is a folder of the same structure.
    """
    format = None if format is None else _writable(format)
    named: list[Task] = []
    inside: list[Task] = []
    for source in sources:
        if source.is_dir():
            whole = source.resolve()
            folder = whole.parent / f"{whole.name}-x{scale}" if target is None else _as_folder(target)
            found = search(source, _IMAGE_SUFFIXES | _VIDEO_SUFFIXES, leave_out=folder)
            if not found.files and not found.unreadable:
                raise RedlineError(f"no image or video found in the folder {str(source)!r}.")
            if found.others:
                say(_left_out(source, found.others))
            for link in found.circles:
                say(f"the symlink {str(link)!r} points to a parent folder and was not followed")
            inside += [Task(path, folder / _renamed(path.relative_to(source), "", format)) for path in found.files]
            inside += [Task(path, folder / path.relative_to(source), problem=why) for path, why in found.unreadable]
        elif target is not None and len(sources) == 1 and target.suffix and not target.is_dir():
            named.append(Task(source, target))
            if format is not None and not named[-1].is_video and target.suffix.lower() not in FORMATS[format].suffixes:
                wrong = f"{str(target)!r} is not a file name for {format}"
                raise RedlineError(f"{wrong}: change one of them, or leave out --format.")
        else:
            folder, addition = (source.parent, f"-x{scale}") if target is None else (_as_folder(target), "")
            named.append(_named_task(source, folder, addition, format))
    seen: dict[Path, Path] = {}
    for task in named:
        if not task.problem and task.target in seen:
            raise RedlineError(_collision(seen[task.target], task, "nothing was written"))
        if not task.problem:
            seen[task.target] = task.source
    checked = [task if task.problem else _checked(task, target) for task in named]
    if len(sources) == 1 and checked and checked[0].problem:
        raise RedlineError(checked[0].problem)
    return _with_problems(checked, [_checked(task, target) if not task.problem else task for task in inside])


def _named_task(source: Path, folder: Path, addition: str, format: str | None) -> Task:
    try:
        is_video = source.exists() and _is_unnamed_video(source)
        return Task(source, folder / _renamed(Path(source.name), addition, format, is_video))
    except ImageError as error:
        return Task(source, folder / source.name, problem=str(error))


def _checked(task: Task, target: Path | None) -> Task:
    """Returns the task, with a problem if it is known to fail before the model is loaded."""
    if not task.source.exists():
        return replace(task, problem=f"cannot read {str(task.source)!r}: it does not exist.")
    if task.target.exists() and task.target.samefile(task.source):
        what = "video" if task.is_video else "image"
        return replace(task, problem=f"the output {str(task.target)!r} is the source {what}; choose another output.")
    if not task.is_video:
        try:
            format_for(task.target)
        except ImageError as error:
            advice = f"{str(error).rstrip('.')}; set it with --format, or give a file name with --out."
            return replace(task, problem=str(error) if task.target == target else advice)
    return task


def _left_out(folder: Path, others: Sequence[Path]) -> str:
    names = ", ".join(str(path.relative_to(folder)) for path in others[:_NAMED])
    more = f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
    files = "1 file" if len(others) == 1 else f"{len(others):,} files"
    return f"skipped {files} in {str(folder)!r} without the suffix of an image or video: {names}{more}"


def _writable(format: str) -> str:
    """Returns the name of the format, also for a suffix such as `jpg`."""
    writable = {name: form.suffixes for name, form in FORMATS.items() if form.writable}
    for name, suffixes in writable.items():
        if format == name or f".{format}" in suffixes:
            return name
    raise RedlineError(f"unknown output format {format!r}: choose {', '.join(writable)}.")


def _as_folder(target: Path) -> Path:
    """Returns the folder for several results; raises if `target` is a file or is named like one."""
    if not target.is_dir():
        output = f"the output {str(target)!r}"
        if target.exists():
            raise RedlineError(f"{output} is a file, and several results need a folder: choose another name.")
        if target.suffix.lower() in _IMAGE_SUFFIXES | _VIDEO_SUFFIXES:
            raise RedlineError(f"{output} is named like a file, but several results need a folder; rename it.")
    return target


def _is_unnamed_video(source: Path) -> bool:
    """Returns whether a file with an unknown suffix is a video; raises if it is neither an image nor a video."""
    if source.suffix.lower() in _IMAGE_SUFFIXES | _VIDEO_SUFFIXES:
        return False
    try:
        sniffed(source)
    except UnsupportedImage:
        raise  # FFmpeg would open some of these files as videos
    except ImageError:
        with suppress(RedlineError):
            if source.is_file() and not probe(source).container.endswith(_STILLS):
                return True
        raise
    return False


def _renamed(path: Path, addition: str, format: str | None, is_video: bool = False) -> Path:
    suffix = path.suffix.lower()
    if is_video or suffix in _VIDEO_SUFFIXES:
        kept = path.suffix if suffix in TARGETS else _INSTEAD.get(suffix, _VIDEO_FALLBACK_SUFFIX)
    elif format is not None:
        kept = FORMATS[format].suffixes[0]
    else:
        kept = _INSTEAD.get(suffix, path.suffix)
    return path.with_name(path.stem + addition + kept)


def _with_problems(named: list[Task], inside: list[Task]) -> list[Task]:
    """Returns all tasks. Of several tasks with the same target, all but one get a problem.

    Files that were given by name have priority, then files whose name does not change.
    """
    first: dict[Path, Task] = {}
    for task in [*named, *sorted(inside, key=lambda task: task.source.name != task.target.name)]:
        first.setdefault(task.target, task)
    checked = []
    for task in (*named, *inside):
        other = first[task.target]
        problem = _collision(other.source, task, f"only {str(other.source)!r} is upscaled")
        checked.append(task if task is other else replace(task, problem=problem))
    return checked


def _collision(first: Path, second: Task, consequence: str) -> str:
    both = f"{str(first)!r} and {str(second.source)!r} would both become {str(second.target)!r}"
    return f"{both}: {consequence}; rename one or use another folder."


@dataclass
class Found:
    """Files with the wanted suffixes, other files, unreadable folders with the error, and links to a parent folder."""

    files: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    circles: list[Path] = field(default_factory=list)


def search(folder: Path, endings: Collection[str], leave_out: Path) -> Found:
    """Returns files sorted by name, those of a folder before those of its subfolders.

    Follows symlinks to folders, but not in circles. Skips hidden files and folders, and the folder `leave_out`, which
    holds the results.
    """
    found, leave_out = Found(), leave_out.resolve()
    # Maps each folder to the resolved paths of its parents and itself, to detect symlinks that lead back to a parent.
    above: dict[Path, tuple[Path, ...]] = {folder: (folder.resolve(),)}

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
        folders[:] = inside  # `os.walk` descends only into these
    return found
