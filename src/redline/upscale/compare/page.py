"""Writes a page that compares images before and after upscaling, with a divider to drag between them.

The page is a single file without external resources, small enough to be sent: the number of images and their total
pixels and bytes are limited. The page counts or names what was left out.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from redline.errors import RedlineError
from redline.files.atomic import check_can_write_file, write_text
from redline.notation import format_bytes, format_seconds
from redline.pages import render_page
from redline.pages.render import read_resource
from redline.upscale.compare.views import Opener, Views, make_views, middle_of, open_upright
from redline.upscale.images.vips import explaining, load_vips
from redline.upscale.tasks import Outcome, Task
from redline.upscale.video.probe import seconds_text

MAX_IMAGES = 24

# The limits for one image, and for all images together.
_IMAGE_PX, _PAGE_PX = 4_000_000, 48_000_000
_PAGE_BYTES = 24_000_000
_AT_ONCE = 4


@dataclass(frozen=True)
class Entry:
    """One image on the page. `seconds` is the duration as text; it is empty if an earlier run wrote the result."""

    name: str
    target: str
    before_bytes: str
    after_bytes: str
    seconds: str
    notes: tuple[str, ...]
    views: Views

    @property
    def factor(self) -> str:
        return f"{self.views.after_size[0] / self.views.before_size[0]:.3g}"


class LeftOut(NamedTuple):
    name: str
    reason: str


def check_page(page: Path) -> None:
    """Raises `RedlineError` if the page cannot be written; called before any work is done."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise RedlineError(f"the name of the comparison page must end in .html: {str(page)!r}.")
    check_can_write_file(page)


def write_comparison(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes the page, with the outcomes in the order given, including those of earlier runs."""
    write_text(page, render_comparison(outcomes))


def render_comparison(outcomes: Sequence[Outcome], max_images: int = MAX_IMAGES) -> str:
    names = _names([outcome.task for outcome in outcomes])
    done = [outcome for outcome in outcomes if not outcome.error]
    shown = done[:max_images]
    show = partial(_show, names=names, share=max(1, len(shown)))
    with ThreadPoolExecutor(_AT_ONCE, "comparing") as pool:
        made = list(pool.map(show, shown))
    left_out = [LeftOut(names[outcome.task], _text(outcome.error)) for outcome in outcomes if outcome.error]
    return render_page(
        "redline.upscale.compare",
        "page.html.jinja",
        script=read_resource("redline.upscale.compare", "page.js"),
        entries=[one for one in made if isinstance(one, Entry)],
        left_out=[one for one in made if isinstance(one, LeftOut)] + left_out,
        too_many=len(done) - len(shown),
    )


def _show(outcome: Outcome, names: dict[Task, str], share: int) -> Entry | LeftOut:
    task, name = outcome.task, names[outcome.task]
    notes = tuple(_text(note) for note in outcome.notes)
    try:
        with explaining(f"cannot show {str(task.source)!r} beside {str(task.target)!r}"):
            if task.is_video:
                before, after, moment = _video_openers(task)
                notes = (moment, *notes)
            else:
                before, after = partial(open_upright, task.source), partial(open_upright, task.target)
            views = make_views(before, after, min(_IMAGE_PX, _PAGE_PX // share), _PAGE_BYTES // share)
            before_bytes, after_bytes = (format_bytes(path.stat().st_size) for path in (task.source, task.target))
    except RedlineError as error:
        return LeftOut(name, _text(str(error)))
    seconds = "" if outcome.skipped else format_seconds(outcome.seconds)
    return Entry(name, _text(task.target.name), before_bytes, after_bytes, seconds, notes, views)


def _video_openers(task: Task) -> tuple[Opener, Opener, str]:
    before, after, seconds = middle_of(task.source, task.target)
    source, result = (load_vips().Image.new_from_array(side, interpretation="srgb") for side in (before, after))
    return lambda: source, lambda: result, f"the frame at {seconds_text(seconds)}"


def _names(tasks: Sequence[Task]) -> dict[Task, str]:
    """Returns the path of each source relative to the common folder of all sources."""
    parents = [str(task.source.absolute().parent) for task in tasks]
    try:
        shared = os.path.commonpath(parents) if parents else ""
    except ValueError:
        return {task: _text(task.source.name) for task in tasks}  # the sources are on different drives
    return {task: _text(os.path.relpath(task.source.absolute(), shared)) for task in tasks}


def _text(text: str) -> str:
    """Replaces bytes of a file name that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
