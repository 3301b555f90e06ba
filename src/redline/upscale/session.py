"""An upscaling from the first path to the last file: network, plan, tiles, then the pictures, then the films."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine import Machine
from redline.upscale.blend import enlarge_by_tiles
from redline.upscale.enlarger import Enlarger
from redline.upscale.journal import Journal
from redline.upscale.layout import Cut, cut_side
from redline.upscale.network import Network, load_network
from redline.upscale.pictures import open_picture
from redline.upscale.pictures_run import Outcome, PictureRun
from redline.upscale.plans import choose_plan
from redline.upscale.settings import UpscaleSettings, describe
from redline.upscale.tasks import Task
from redline.upscale.tile_choice import choose_tiles, measure_cost, memory_for_tiles
from redline.upscale.video import VideoProgress, upscale_video


@dataclass(frozen=True)
class Listener:
    """What is heard meanwhile: sentences, how far a picture or film is, and each file's outcome."""

    say: Callable[[str], None] = lambda _text: None
    finished: Callable[[Outcome], None] = lambda _outcome: None
    picture_progress: Callable[[Task, int, int], None] = lambda _task, _rows, _total: None
    film_progress: Callable[[VideoProgress], None] = lambda _progress: None


class Upscaling:
    """Made once; runs any number of tasks with the same network and plan."""

    def __init__(self, settings: UpscaleSettings, listener: Listener | None = None) -> None:
        self.settings, self.listener = settings, listener or Listener()
        self.network: Network = load_network(settings.weights, settings.scale)
        self.machine = Machine.detect(settings.device)
        self.plan = choose_plan(self.machine, settings.precision, settings.plan)
        self.enlarger: Enlarger | None = None

    def run(self, tasks: Sequence[Task], journal_folder: Path | None = None) -> list[Outcome]:
        """Every task's outcome; a bad file is one of them, and only what concerns all of them raises."""
        made_as = describe(self.settings, str(self.plan), self.network.digest)
        journal = Journal(journal_folder, made_as) if journal_folder is not None else None
        outcomes: list[Outcome] = []
        waiting: list[Task] = []
        for task in tasks:
            if self.settings.resume and journal is not None and journal.is_done(task):
                outcomes.append(Outcome(task, skipped=True))
                self.listener.finished(outcomes[-1])
            else:
                waiting.append(task)
        if not waiting:
            return outcomes
        tile = journal.tile if self.settings.resume and journal is not None else None
        enlarger = self.enlarger = self.enlarger or self._make_enlarger(tasks, self.settings.tile or tile)

        def finished(outcome: Outcome) -> None:
            if journal is not None and not outcome.error:
                journal.record(outcome.task, enlarger.cut.tile)
            self.listener.finished(outcome)

        pictures = [task for task in waiting if not task.is_film]
        outcomes += PictureRun(enlarger, self.settings.pictures, finished, self.listener.picture_progress).run(pictures)
        for task in waiting:
            if task.is_film:
                outcomes.append(self._enlarge_film(task, enlarger, made_as))
                finished(outcomes[-1])
        return outcomes

    def _enlarge_film(self, task: Task, enlarger: Enlarger, made_as: str) -> Outcome:
        def enlarge(frames: Tensor) -> Tensor:
            frames = frames.to(enlarger.device)
            return enlarge_by_tiles(frames, enlarger.checked, self.network.scale, enlarger.cut, enlarger.batch)

        settings = replace(self.settings.films, model=made_as, resume=self.settings.resume)
        try:
            film = upscale_video(
                task.source, task.target, enlarge, self.network.scale, settings, self.listener.film_progress
            )
        except (RedlineError, OSError) as error:
            return Outcome(task, error=str(error))
        return Outcome(task, film.width, film.height, film.seconds, film.notes)

    def _make_enlarger(self, tasks: Sequence[Task], tile: int | None) -> Enlarger:
        settings, window, device = self.settings, self.network.window, torch.device(self.machine.device)
        align = window
        if tile is not None:
            tile = -(-tile // align) * align
            cut, batch = Cut(tile, settings.margin_px, settings.ramp_px, align), settings.tile_batch or 1
        else:
            budget = settings.memory_bytes or memory_for_tiles(device)
            cost = measure_cost(self.network, device)
            side = largest_side(tasks, settings)
            cut, batch = choose_tiles(
                cost, budget, align, settings.margin_px, settings.ramp_px, side, settings.tile_batch
            )
            # A batch is filled from one row of tiles.
            batch = settings.tile_batch or min(batch, len(cut_side(side, cut).starts))
        self.listener.say(
            f"{self.network.name} on {self.machine.name} under {self.plan}, {batch} tile{'s' if batch > 1 else ''} of "
            f"{cut.tile} × {cut.tile} at a time"
        )
        return Enlarger(self.network, self.plan, device, cut, batch, self.listener.say)


def largest_side(tasks: Sequence[Task], settings: UpscaleSettings, looked_at: int = 64) -> int:
    """The longest side among the first pictures; a film, or nothing readable, counts as large."""
    longest = 0
    for task in tasks[:looked_at]:
        if task.is_film:
            return 10**6
        try:
            with open_picture(task.source, settings.pictures.pixel_limit) as picture:
                longest = max(longest, picture.width, picture.height)
        except RedlineError:
            continue
    return longest or 10**6
