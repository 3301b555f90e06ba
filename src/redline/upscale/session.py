"""An upscaling from the first path to the last file: network, plan, tiles, then the images, then the videos."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.files.partial import remove_abandoned
from redline.ladder.plan import Plan
from redline.ladder.plans.choose import ChosenPlan, choose_plan
from redline.ladder.rung import Stage
from redline.machine.machine import Machine
from redline.machine.memory import is_out_of_memory
from redline.upscale.image_run import ImageRun
from redline.upscale.images import open_image
from redline.upscale.journal import Journal
from redline.upscale.listener import Listener, Outcome
from redline.upscale.network import Network, load_network
from redline.upscale.onnx_network import load_onnx_network
from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings, describe, describe_network
from redline.upscale.tasks import Task
from redline.upscale.tile_choice import (
    MOST_SHAPES,
    ShapeLimits,
    choose_tiles,
    measure_cost,
    memory_for_tiles,
    with_batch,
)
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import Cut, TileShape, Tiling, padded_size, smallest_tile
from redline.upscale.video import VideoProgress, notes_on_parts, probe, tiles_of_parts, upscale_video
from redline.upscale.whole_images import WholeImages
from redline.upscale.workers.crew import Crew, start_crew, worker_devices
from redline.upscale.workers.messages import Job
from redline.upscale.workers.shared_run import SharedRun
from redline.upscale.workers.split_image import is_large

Sizes = tuple[tuple[int, int], ...]
Finished = Callable[[Outcome, Tiles], None]  # what became of a file, and the tiles of its run

# Enough for copies to hide behind the computing.
_STREAMS = 2
# Images of which the first that can be read is what all workers calibrate on.
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
        if settings.weights is not None and settings.is_onnx:
            # An exported network runs in an engine of its own, which no rung reaches into.
            self.network: Network = load_onnx_network(
                settings.weights, settings.scale, settings.provider, self.machine.device
            )
            self.chosen = ChosenPlan(Plan())
        else:
            self.network = load_network(settings.weights, settings.scale)
            given = None if settings.plan is None else Plan.load(settings.plan)
            self.chosen = choose_plan("upscale", self.machine, settings.precision, given, self.network.module)
        self.plan = self.chosen.plan
        self._check_tile()
        self.made_by = describe_network(settings, str(self.plan), self.network.digest)
        self.tile_runner: TileRunner | None = None

    def made_as(self, task: Task) -> str:
        return describe(self.settings, self.made_by, task.is_video)

    def run(self, tasks: Sequence[Task], journal_folder: Path | None = None) -> list[Outcome]:
        """Every task's outcome; a bad file is one of them, and only what concerns all of them raises."""
        journal = Journal(journal_folder, self.made_as) if journal_folder is not None else None
        outcomes: list[Outcome] = []
        waiting: list[Task] = []
        for folder in {task.target.parent for task in tasks}:
            remove_abandoned(folder)
        for task in tasks:
            if task.problem:
                outcomes.append(Outcome(task, error=task.problem))
            elif self.settings.resume and journal is not None and journal.is_done(task):
                outcomes.append(Outcome(task, skipped=True))
            else:
                waiting.append(task)
                continue
            self.listener.finished(outcomes[-1])
        if not waiting:
            return outcomes
        cannot_note = False
        sizes = self._sizes_of(tasks)
        digest = _digest(sizes)

        def finished(outcome: Outcome, tiles: Tiles) -> None:
            nonlocal cannot_note
            if not outcome.error:
                self._say_if_changed(outcome)
            if journal is not None and not outcome.error:
                try:
                    journal.record(outcome.task, outcome.source_state, replace(tiles, chosen_for=digest))
                except OSError as error:
                    if not cannot_note:
                        reason = error.strerror or error
                        self.listener.say(f"cannot note what is done: {reason}; --resume will do such files again")
                    cannot_note = True
            self.listener.finished(outcome)

        tiles = self._known_tiles(tasks, journal, sizes, digest)
        try:
            return outcomes + self._run_waiting(waiting, tiles, sizes, finished)
        except KeyboardInterrupt:
            for task in waiting:
                for note in notes_on_parts(task.target) if task.is_video else ():
                    self.listener.say(f"{task.source.name}: {note}")
            raise

    def _run_waiting(
        self, waiting: Sequence[Task], tiles: Tiles | None, sizes: Sizes, finished: Finished
    ) -> list[Outcome]:
        crew = self.crew
        if crew is None and len(devices := self._devices(waiting)) > 1:
            crew = start_crew(devices)
        if crew is None:
            with torch.cuda.device(self.machine.device) if self.machine.is_cuda else nullcontext():
                return self._run_alone(waiting, tiles, sizes, finished)
        with crew:
            return self._run_shared(crew, waiting, tiles, sizes, finished)

    def _known_tiles(
        self, tasks: Sequence[Task], journal: Journal | None, images: Sizes, chosen_for: str | None = None
    ) -> Tiles | None:
        """Those asked for, or those of the run that is resumed, if it was about the same images: others would give
        slightly different pixels."""
        settings, exported = self.settings, self.network.tile
        if exported:  # what it takes in memory is not measured
            return Tiles(((exported, exported),), settings.tile_batch or 1)
        before = None
        if settings.resume:
            parts = (tiles_of_parts(task.target, self.made_by) for task in tasks if task.is_video)
            before = next((Tiles(*found) for found in parts if found), None)
            before = before or (journal.tiles(tasks, chosen_for) if journal is not None else None)
        if settings.tile_sizes is None:
            return replace(before, batch=settings.tile_batch or before.batch) if before else None
        sizes = self.tiling(self._no_larger_than(images, settings.tile_sizes)).sizes
        batch = before.batch if before and before.sizes == sizes else None
        return Tiles(sizes, settings.tile_batch or batch)

    def _no_larger_than(self, images: Sizes, tiles: TileSizes) -> TileSizes:
        """What reaches beyond the largest image would be computed for nothing."""
        least = smallest_tile(self.settings.margin_px, self.settings.ramp_px, self.network.window)
        widest, tallest = (max(least, max(side)) for side in zip(*images, strict=True))
        return tuple((min(width, widest), min(height, tallest)) for width, height in tiles)

    def _say_if_changed(self, outcome: Outcome) -> None:
        source, before = outcome.task.source, outcome.source_state
        if before is not None and outcome.task.source_state() != before:
            self.listener.say(f"{str(source)!r} changed while it was read; --resume will do it again")

    def _devices(self, tasks: Sequence[Task]) -> list[str]:
        """One for each worker that finds something to do: as many as there are files, more when one can be shared."""
        devices = worker_devices(self.settings.device, self.settings.workers)
        if len(tasks) < len(devices) and not any(is_large(task, self.settings) for task in tasks):
            return devices[: len(tasks)]
        return devices

    def _run_alone(self, tasks: Sequence[Task], tiles: Tiles | None, sizes: Sizes, finished: Finished) -> list[Outcome]:
        if self.tile_runner is None:
            tiling, batch = self.choose_tiles(sizes, tiles)
            self._say_what_runs(tiling, batch)
            self.tile_runner = self.make_tile_runner(tiling, batch)
        tile_runner = self.tile_runner

        def tell(outcome: Outcome) -> None:
            finished(outcome, Tiles(tile_runner.tiling.sizes, tile_runner.batch))

        images = [task for task in tasks if not task.is_video]
        outcomes = ImageRun(tile_runner, self.settings.images, tell, self.listener.image_progress).run(images)
        for task in tasks:
            if task.is_video:
                outcomes.append(self.upscale_video_task(task, tile_runner))
                tell(outcomes[-1])
        return outcomes

    def _run_shared(
        self,
        crew: Crew,
        tasks: Sequence[Task],
        tiles: Tiles | None,
        sizes: Sizes,
        finished: Finished,
    ) -> list[Outcome]:
        samples = tuple(task for task in tasks if not task.is_video)[:_SAMPLES]
        shared = SharedRun(crew, Job(self.settings, samples, tiles, sizes), self.listener)
        agreed = shared.agree(str(self.plan), self.network.digest)
        tiling = self.tiling(agreed.tiles, agreed.batch)
        self._say_what_runs(tiling, agreed.batch, f", {len(crew)} workers")
        used = Tiles(tiling.sizes, agreed.batch)
        return shared.run(tasks, tiling, self.network.scale, lambda outcome: finished(outcome, used))

    def upscale_video_task(self, task: Task, tile_runner: TileRunner) -> Outcome:
        def advance(progress: VideoProgress) -> None:
            self.listener.video_progress(task, progress)

        tiles = (tile_runner.tiling.sizes, tile_runner.batch)
        settings = replace(self.settings.videos, model=self.made_by, tiles=tiles, resume=self.settings.resume)
        state = task.source_state()
        try:
            video = upscale_video(
                task.source,
                task.target,
                WholeImages(tile_runner),
                self.network.scale,
                settings,
                advance,
                tile_runner.copies,
            )
        except (RedlineError, OSError) as error:
            return Outcome(task, error=str(error), notes=notes_on_parts(task.target))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = f"out of memory at {str(task.source)!r}: {tile_runner.advice}."
            return Outcome(task, error=said, notes=notes_on_parts(task.target))
        return Outcome(task, video.width, video.height, video.seconds, video.notes, source_state=state)

    def choose_tiles(self, sizes: Sizes, tiles: Tiles | None = None, sharing: int = 1) -> tuple[Tiling, int]:
        """The tiles and the batch for such images, where `sharing` workers use the memory; `tiles` if given."""
        settings, device = self.settings, torch.device(self.machine.device)
        if tiles is not None and tiles.batch and settings.memory_bytes is None:
            return self.tiling(tiles.sizes, tiles.batch), tiles.batch
        budget = (settings.memory_bytes or memory_for_tiles(device)) // sharing
        cost = measure_cost(self.network, device)
        if tiles is not None:
            # Only what was asked for by name is a limit to refuse by: when memory does run out, less is taken.
            refuse = settings.memory_bytes is not None
            return with_batch(cost, budget, self.tiling(tiles.sizes), sizes, tiles.batch, self._limits.fills, refuse)
        like = self._cut(smallest_tile(settings.margin_px, settings.ramp_px, self.network.window))
        return choose_tiles(cost, budget, like, sizes, settings.tile_batch, device.type, self._limits)

    @property
    def _limits(self) -> ShapeLimits:
        """A graph of another shape is recorded in seconds; what is compiled for one is slower, or nothing, for
        others."""
        compiles, recorded = (
            [rung for rung in self.plan.rungs if rung.stage == stage] for stage in (Stage.COMPILE, Stage.LAUNCH)
        )
        passes = max((getattr(rung, "rehearsals", 0) for rung in recorded), default=0)
        return ShapeLimits(1 if compiles else MOST_SHAPES, passes, bool(compiles or recorded))

    def tiling(self, sizes: TileSizes, batch: int = 1) -> Tiling:
        """Tiles of these widths and heights, or of the next multiples of the network's window."""
        window = self.network.window
        rounded = ((-(-length // window) * window for length in size) for size in sizes)
        shapes = tuple(TileShape(self._cut(height), self._cut(width)) for width, height in rounded)
        return Tiling(shapes, batch if self._limits.fills else 1)

    def _sizes_of(self, tasks: Sequence[Task]) -> Sizes:
        """As they are cut."""
        like = self._cut(smallest_tile(self.settings.margin_px, self.settings.ramp_px, self.network.window))
        return tuple(padded_size(size, like, self.settings.images.wrap) for size in sizes_of(tasks, self.settings))

    def _check_tile(self) -> None:
        """Before anything is begun; of a tile that the network fixes, another sentence."""
        settings, exported = self.settings, self.network.tile
        least = smallest_tile(settings.margin_px, settings.ramp_px, self.network.window)
        if exported and exported < least:
            raise RedlineError(
                f"{self.network.name} takes tiles of {exported}, too small for an overlap of "
                f"{2 * settings.margin_px + settings.ramp_px}: export it with --tile {least} or more."
            )
        for size in settings.tile_sizes or ():
            if min(size) < least:
                raise RedlineError(f"a tile of {min(size)} is too small: take {least} or more.")

    def _cut(self, tile: int) -> Cut:
        return Cut(tile, self.settings.margin_px, self.settings.ramp_px, self.network.window)

    def make_tile_runner(self, tiling: Tiling, batch: int) -> TileRunner:
        streams = self.settings.streams or _STREAMS
        return TileRunner(self.network, self.plan, self.machine.device, tiling, batch, self.listener.say, streams)

    def _say_what_runs(self, tiling: Tiling, batch: int, by: str = "") -> None:
        tiles = f"{batch} tile{'s' if batch > 1 else ''} of {tiling} at a time"
        self.listener.say(f"{self.network.name} on {self.machine.name} under {self.chosen}, {tiles}{by}")


def sizes_of(tasks: Sequence[Task], settings: UpscaleSettings, looked_at: int = 256) -> tuple[tuple[int, int], ...]:
    """Width and height of the first images and videos; where none can be read they count as large."""
    sizes: list[tuple[int, int]] = []
    for task in tasks[:looked_at]:
        try:
            if task.is_video:
                video = probe(task.source)
                sizes.append((video.width, video.height))
            else:
                with open_image(task.source, settings.images.pixel_limit) as image:
                    sizes.append((image.width, image.height))
        except (RedlineError, OSError):
            continue
    return tuple(sizes) or ((_LARGE_PX, _LARGE_PX),)


def _digest(sizes: Sizes) -> str:
    return hashlib.sha256(repr(sorted(sizes)).encode()).hexdigest()[:16]
