"""An upscaling from the first path to the last file: network, plan, tiles, then the pictures, then the films."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.machine import Machine
from redline.plan import Plan
from redline.rung import Stage
from redline.upscale.enlarger import Enlarger
from redline.upscale.journal import Journal
from redline.upscale.layout import Cut, TileShape, Tiling, smallest_tile
from redline.upscale.listener import Listener, Outcome
from redline.upscale.network import Network, load_network
from redline.upscale.onnx_network import load_onnx_network
from redline.upscale.pictures import open_picture
from redline.upscale.pictures_run import PictureRun
from redline.upscale.plans import choose_plan
from redline.upscale.settings import TileSizes, UpscaleSettings, describe
from redline.upscale.tasks import Task
from redline.upscale.tile_choice import choose_tiles, measure_cost, memory_for_tiles
from redline.upscale.video import VideoProgress, probe, upscale_video
from redline.upscale.whole_pictures import WholePictures
from redline.upscale.workers.crew import Crew, start_crew, worker_devices
from redline.upscale.workers.messages import Job
from redline.upscale.workers.shared_run import SharedRun
from redline.upscale.workers.split_picture import is_large

Sizes = tuple[tuple[int, int], ...]
Finished = Callable[[Outcome, TileSizes], None]  # what became of a file, and the tiles of its run

# Enough for copies to hide behind the computing.
_STREAMS = 2
# Pictures of which the first that can be read is what all workers calibrate on.
_SAMPLES = 16
_LARGE_PX = 100_000


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
        before = journal.tiles if self.settings.resume and journal is not None else None

        def finished(outcome: Outcome, tiles: TileSizes) -> None:
            if journal is not None and not outcome.error:
                journal.record(outcome.task, tiles)
            self.listener.finished(outcome)

        exported = self.network.tile
        tiles = ((exported, exported),) if exported else self.settings.tile_sizes or before
        sizes = () if tiles is not None else sizes_of(tasks, self.settings)
        crew = self.crew
        if crew is None and len(devices := self._devices(waiting)) > 1:
            crew = start_crew(devices)
        if crew is None:
            with torch.cuda.device(self.machine.device) if self.machine.is_cuda else nullcontext():
                return outcomes + self._run_alone(waiting, tiles, sizes, finished)
        with crew:
            return outcomes + self._run_shared(crew, waiting, tiles, sizes, finished)

    def _devices(self, tasks: Sequence[Task]) -> list[str]:
        """One for each worker that finds something to do: as many as there are files, more when one can be shared."""
        devices = worker_devices(self.settings.device, self.settings.workers)
        if len(tasks) < len(devices) and not any(is_large(task, self.settings) for task in tasks):
            return devices[: len(tasks)]
        return devices

    def _run_alone(
        self, tasks: Sequence[Task], tiles: TileSizes | None, sizes: Sizes, finished: Finished
    ) -> list[Outcome]:
        if self.enlarger is None:
            tiling, batch = self.choose_tiles(sizes, tiles)
            self._say_what_runs(tiling, batch)
            self.enlarger = self.make_enlarger(tiling, batch)
        enlarger = self.enlarger

        def tell(outcome: Outcome) -> None:
            finished(outcome, enlarger.tiling.sizes)

        pictures = [task for task in tasks if not task.is_film]
        outcomes = PictureRun(enlarger, self.settings.pictures, tell, self.listener.picture_progress).run(pictures)
        for task in tasks:
            if task.is_film:
                outcomes.append(self.enlarge_film(task, enlarger))
                tell(outcomes[-1])
        return outcomes

    def _run_shared(
        self,
        crew: Crew,
        tasks: Sequence[Task],
        tiles: TileSizes | None,
        sizes: Sizes,
        finished: Finished,
    ) -> list[Outcome]:
        samples = tuple(task for task in tasks if not task.is_film)[:_SAMPLES]
        shared = SharedRun(crew, Job(self.settings, samples, tiles, sizes), self.listener)
        agreed = shared.agree(str(self.plan), self.network.digest)
        tiling = self.tiling(agreed.tiles)
        self._say_what_runs(tiling, agreed.batch, f", {len(crew)} workers")
        return shared.run(tasks, tiling, self.network.scale, lambda outcome: finished(outcome, tiling.sizes))

    def enlarge_film(self, task: Task, enlarger: Enlarger) -> Outcome:
        def advance(progress: VideoProgress) -> None:
            self.listener.film_progress(task, progress)

        settings = replace(self.settings.films, model=self.made_as, resume=self.settings.resume)
        try:
            film = upscale_video(
                task.source,
                task.target,
                WholePictures(enlarger),
                self.network.scale,
                settings,
                advance,
                enlarger.copies,
            )
        except (RedlineError, OSError) as error:
            return Outcome(task, error=str(error))
        return Outcome(task, film.width, film.height, film.seconds, film.notes)

    def choose_tiles(self, sizes: Sizes, tiles: TileSizes | None = None, sharing: int = 1) -> tuple[Tiling, int]:
        """The tiles and the batch for such pictures, where `sharing` workers use the memory; `tiles` if given."""
        settings, device = self.settings, torch.device(self.machine.device)
        if tiles is not None:
            return self.tiling(tiles), settings.tile_batch or 1
        budget = (settings.memory_bytes or memory_for_tiles(device)) // sharing
        cost = measure_cost(self.network, device)
        like = self._cut(smallest_tile(settings.margin_px, settings.ramp_px, self.network.window))
        # A graph of another shape is recorded in seconds; what is compiled for one is slower, or nothing, for others.
        most_shapes = 1 if any(rung.stage == Stage.COMPILE for rung in self.plan.rungs) else 2
        return choose_tiles(cost, budget, like, sizes, settings.tile_batch, device.type, most_shapes)

    def tiling(self, sizes: TileSizes) -> Tiling:
        """Tiles of these widths and heights, or of the next multiples of the network's window."""
        window = self.network.window
        rounded = ((-(-length // window) * window for length in size) for size in sizes)
        return Tiling(tuple(TileShape(self._cut(height), self._cut(width)) for width, height in rounded))

    def _cut(self, tile: int) -> Cut:
        return Cut(tile, self.settings.margin_px, self.settings.ramp_px, self.network.window)

    def make_enlarger(self, tiling: Tiling, batch: int) -> Enlarger:
        streams = self.settings.streams or _STREAMS
        return Enlarger(self.network, self.plan, self.machine.device, tiling, batch, self.listener.say, streams)

    def _say_what_runs(self, tiling: Tiling, batch: int, by: str = "") -> None:
        tiles = f"{batch} tile{'s' if batch > 1 else ''} of {tiling} at a time"
        self.listener.say(f"{self.network.name} on {self.machine.name} under {self.plan}, {tiles}{by}")


def sizes_of(tasks: Sequence[Task], settings: UpscaleSettings, looked_at: int = 64) -> tuple[tuple[int, int], ...]:
    """Width and height of the first pictures and films; where none can be read they count as large."""
    sizes: list[tuple[int, int]] = []
    for task in tasks[:looked_at]:
        try:
            if task.is_film:
                film = probe(task.source)
                sizes.append((film.width, film.height))
            else:
                with open_picture(task.source, settings.pictures.pixel_limit) as picture:
                    sizes.append((picture.width, picture.height))
        except (RedlineError, OSError):
            continue
    return tuple(sizes) or ((_LARGE_PX, _LARGE_PX),)
