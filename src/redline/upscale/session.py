"""An upscaling from the first path to the last file: network, plan, tiles, then the pictures, then the films."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine import Machine
from redline.plan import Plan
from redline.upscale.blend import enlarge_by_tiles
from redline.upscale.crew import Crew, start_crew, worker_devices
from redline.upscale.enlarger import Enlarger
from redline.upscale.journal import Journal
from redline.upscale.layout import Cut, cut_side
from redline.upscale.listener import Listener
from redline.upscale.messages import Job
from redline.upscale.network import Network, load_network
from redline.upscale.onnx_network import load_onnx_network
from redline.upscale.pictures import open_picture
from redline.upscale.pictures_run import Outcome, PictureRun
from redline.upscale.plans import choose_plan
from redline.upscale.settings import UpscaleSettings, describe
from redline.upscale.splitting import is_large
from redline.upscale.tasks import Task
from redline.upscale.tile_choice import choose_tiles, measure_cost, memory_for_tiles
from redline.upscale.video import VideoProgress, upscale_video
from redline.upscale.workers import SharedRun

# Pictures of which the first that can be read is what all workers calibrate on.
_SAMPLES = 16


class Upscaling:
    """Made once; runs any number of tasks with the same network and plan.

    It starts the workers that `settings` ask for where there is enough to do for them; a `crew` that is there already
    (the ranks of torchrun) does everything, for one run.
    """

    def __init__(self, settings: UpscaleSettings, listener: Listener | None = None, crew: Crew | None = None) -> None:
        self.settings, self.listener, self.crew = settings, listener or Listener(), crew
        self.machine = Machine.detect(settings.device)
        if settings.weights is not None and settings.weights.suffix.lower() == ".onnx":
            # An exported network runs in an engine of its own, which no rung reaches into.
            self.network: Network = load_onnx_network(settings.weights, settings.provider, self.machine.device)
            self.plan = Plan()
        else:
            self.network = load_network(settings.weights, settings.scale)
            self.plan = choose_plan(self.machine, settings.precision, settings.plan)
        self.made_as = describe(settings, str(self.plan), self.network.digest)
        self.enlarger: Enlarger | None = None

    def run(self, tasks: Sequence[Task], journal_folder: Path | None = None) -> list[Outcome]:
        """Every task's outcome; a bad file is one of them, and only what concerns all of them raises."""
        journal = Journal(journal_folder, self.made_as) if journal_folder is not None else None
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
        before = journal.tile if self.settings.resume and journal is not None else None

        def finished(outcome: Outcome, tile: int) -> None:
            if journal is not None and not outcome.error:
                journal.record(outcome.task, tile)
            self.listener.finished(outcome)

        tile = self.network.tile or self.settings.tile or before
        side = 0 if tile is not None else largest_side(tasks, self.settings)
        crew = self.crew
        if crew is None and len(devices := self._devices(waiting)) > 1:
            crew = start_crew(devices)
        if crew is None:
            return outcomes + self._run_alone(waiting, tile, side, finished)
        with crew:
            return outcomes + self._run_shared(crew, waiting, tile, side, finished)

    def _devices(self, tasks: Sequence[Task]) -> list[str]:
        """One for each worker that finds something to do: as many as there are files, more when one can be shared."""
        devices = worker_devices(self.settings.device, self.settings.workers)
        if len(tasks) < len(devices) and not any(is_large(task, self.settings) for task in tasks):
            return devices[: len(tasks)]
        return devices

    def _run_alone(
        self, tasks: Sequence[Task], tile: int | None, side: int, finished: Callable[[Outcome, int], None]
    ) -> list[Outcome]:
        if self.enlarger is None:
            cut, batch = self.choose_tiles(side, tile)
            self._say_what_runs(cut, batch)
            self.enlarger = self.make_enlarger(cut, batch)
        enlarger = self.enlarger

        def tell(outcome: Outcome) -> None:
            finished(outcome, enlarger.cut.tile)

        pictures = [task for task in tasks if not task.is_film]
        outcomes = PictureRun(enlarger, self.settings.pictures, tell, self.listener.picture_progress).run(pictures)
        for task in tasks:
            if task.is_film:
                outcomes.append(self.enlarge_film(task, enlarger))
                tell(outcomes[-1])
        return outcomes

    def _run_shared(
        self, crew: Crew, tasks: Sequence[Task], tile: int | None, side: int, finished: Callable[[Outcome, int], None]
    ) -> list[Outcome]:
        samples = tuple(task for task in tasks if not task.is_film)[:_SAMPLES]
        shared = SharedRun(crew, Job(self.settings, samples, tile, side), self.listener)
        agreed = shared.agree(str(self.plan), self.network.digest)
        cut = self.cut(agreed.tile)
        self._say_what_runs(cut, agreed.batch, f", {len(crew)} workers")
        return shared.run(tasks, cut, self.network.scale, lambda outcome: finished(outcome, cut.tile))

    def enlarge_film(self, task: Task, enlarger: Enlarger) -> Outcome:
        def enlarge(frames: Tensor) -> Tensor:
            frames = frames.to(enlarger.device)
            return enlarge_by_tiles(frames, enlarger.checked, self.network.scale, enlarger.cut, enlarger.batch)

        def advance(progress: VideoProgress) -> None:
            self.listener.film_progress(task, progress)

        settings = replace(self.settings.films, model=self.made_as, resume=self.settings.resume)
        try:
            film = upscale_video(task.source, task.target, enlarge, self.network.scale, settings, advance)
        except (RedlineError, OSError) as error:
            return Outcome(task, error=str(error))
        return Outcome(task, film.width, film.height, film.seconds, film.notes)

    def choose_tiles(self, side: int, tile: int | None = None, sharing: int = 1) -> tuple[Cut, int]:
        """The cut and the batch for pictures of that side, where `sharing` workers use the memory; `tile` if given."""
        settings, window, device = self.settings, self.network.window, torch.device(self.machine.device)
        if tile is not None:
            return self.cut(-(-tile // window) * window), settings.tile_batch or 1
        budget = (settings.memory_bytes or memory_for_tiles(device)) // sharing
        cost = measure_cost(self.network, device)
        cut, batch = choose_tiles(cost, budget, window, settings.margin_px, settings.ramp_px, side, settings.tile_batch)
        # A batch is filled from one row of tiles.
        return cut, settings.tile_batch or min(batch, len(cut_side(side, cut).starts))

    def cut(self, tile: int) -> Cut:
        return Cut(tile, self.settings.margin_px, self.settings.ramp_px, self.network.window)

    def make_enlarger(self, cut: Cut, batch: int) -> Enlarger:
        return Enlarger(self.network, self.plan, self.machine.device, cut, batch, self.listener.say)

    def _say_what_runs(self, cut: Cut, batch: int, by: str = "") -> None:
        tiles = f"{batch} tile{'s' if batch > 1 else ''} of {cut.tile} × {cut.tile} at a time"
        self.listener.say(f"{self.network.name} on {self.machine.name} under {self.plan}, {tiles}{by}")


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
