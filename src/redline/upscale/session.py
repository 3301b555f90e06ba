"""Runs upscaling tasks: loads network and plan, skips finished files, and processes the rest alone or with workers."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.files.partial import remove_abandoned
from redline.ladder.plan import Plan
from redline.ladder.plans.choose import ChosenPlan, choose_plan
from redline.machine.machine import Machine
from redline.machine.memory import is_out_of_memory
from redline.upscale.image_run import ImageRun
from redline.upscale.journal import Journal
from redline.upscale.network import Network, load_network, load_onnx_network
from redline.upscale.settings import Tiles, UpscaleSettings, describe, describe_network
from redline.upscale.tasks import Listener, Outcome, Task
from redline.upscale.tile_choice import Sizes, TilePlanner
from redline.upscale.tile_runner import TileRunner, WholeImages
from redline.upscale.tiling import Tiling
from redline.upscale.video.parts import notes_on_parts, tiles_of_parts
from redline.upscale.video.run import upscale_video
from redline.upscale.workers.crew import Crew, Job, start_crew, worker_devices
from redline.upscale.workers.shared_run import SharedRun
from redline.upscale.workers.split_image import is_large

Finished = Callable[[Outcome, Tiles], None]  # called with the outcome of a file and the tiles of its run

# One stream computes while the other copies.
_DEFAULT_STREAMS = 2
# Workers receive at most this many images to calibrate on; each worker uses the first readable one.
_CALIBRATION_IMAGES = 16


class Upscaling:
    """A loaded network with its plan, which runs any number of tasks.

    Starts the workers that `settings` ask for if there is enough work. If `crew` is given (the ranks of torchrun), no
    workers are started: the crew does all the work, for one run only.
    """

    def __init__(self, settings: UpscaleSettings, listener: Listener | None = None, crew: Crew | None = None) -> None:
        self.settings, self.listener, self.crew = settings, listener or Listener(), crew
        self.machine = Machine.detect(settings.device)
        self.network, self.chosen = _load(settings, self.machine)
        self.plan = self.chosen.plan
        self.planner = TilePlanner(settings, self.network, self.plan, self.machine.device)
        self.made_by = describe_network(settings, str(self.plan), self.network.digest)
        self.tile_runner: TileRunner | None = None
        self._planned_for: Sizes = ()

    def made_as(self, task: Task) -> str:
        return describe(self.settings, self.made_by, task.is_video)

    def run(self, tasks: Sequence[Task], journal_folder: Path | None = None) -> list[Outcome]:
        """Returns an outcome for every task, in order. Errors of one file become its outcome; others are raised."""
        journal = Journal(journal_folder, self.made_as) if journal_folder is not None else None
        outcomes: dict[Task, Outcome] = {}
        waiting: list[Task] = []
        for folder in {task.target.parent for task in tasks}:
            remove_abandoned(folder)
        for task in tasks:
            if task.problem:
                outcomes[task] = Outcome(task, error=task.problem)
            elif self.settings.resume and journal is not None and journal.is_done(task):
                outcomes[task] = Outcome(task, skipped=True)
            else:
                waiting.append(task)
                continue
            self.listener.finished(outcomes[task])
        if waiting:
            sizes = self.planner.sizes_of(tasks)
            digest = hashlib.sha256(repr(sorted(sizes)).encode()).hexdigest()[:16]
            tiles = self.planner.known_tiles(sizes, self._tiles_of_earlier_run(tasks, journal, digest))
            finished = self._finishing(journal, digest)
            try:
                outcomes |= {outcome.task: outcome for outcome in self._run(waiting, tiles, sizes, finished)}
            except KeyboardInterrupt:
                for task in waiting:
                    for note in notes_on_parts(task.target) if task.is_video else ():
                        self.listener.say(f"{task.source.name}: {note}")
                raise
        return [outcomes[task] for task in tasks]

    def _finishing(self, journal: Journal | None, digest: str) -> Finished:
        """Returns a function that reports the outcome of a file and writes it to the journal.

        If the journal cannot be written, there is only a warning.
        """
        has_warned = False

        def finished(outcome: Outcome, tiles: Tiles) -> None:
            nonlocal has_warned
            task, before = outcome.task, outcome.source_state
            if not outcome.error and before is not None and task.source_state() != before:
                self.listener.say(f"{str(task.source)!r} changed while it was read; --resume will upscale it again")
            if not outcome.error and journal is not None:
                try:
                    journal.record(task, before, replace(tiles, chosen_for=digest))
                except OSError as error:
                    if not has_warned:
                        warning = f"cannot write the journal: {error.strerror or error}"
                        self.listener.say(f"{warning}; --resume will upscale these files again")
                    has_warned = True
            self.listener.finished(outcome)

        return finished

    def _tiles_of_earlier_run(self, tasks: Sequence[Task], journal: Journal | None, digest: str) -> Tiles | None:
        """Returns the tiles of the run that is resumed, because other tiles would give slightly different pixels."""
        if not self.settings.resume:
            return None
        parts = (tiles_of_parts(task.target, self.made_by) for task in tasks if task.is_video)
        found = next((Tiles(*found) for found in parts if found), None)
        return found or (journal.tiles(tasks, digest) if journal is not None else None)

    def _run(self, tasks: Sequence[Task], tiles: Tiles | None, sizes: Sizes, finished: Finished) -> list[Outcome]:
        crew = self.crew
        if crew is None and len(devices := self._worker_devices(tasks)) > 1:
            crew = start_crew(devices)
        if crew is None:
            with self.on_device():
                return self._run_alone(tasks, tiles, sizes, finished)
        with crew:
            return self._run_shared(crew, tasks, tiles, sizes, finished)

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.machine.device) if self.machine.is_cuda else nullcontext()

    def _worker_devices(self, tasks: Sequence[Task]) -> list[str]:
        """Returns a device per worker: at most one worker per file, unless a large image can be shared."""
        devices = worker_devices(self.settings.device, self.settings.workers)
        if len(tasks) < len(devices) and not any(is_large(task, self.settings) for task in tasks):
            return devices[: len(tasks)]
        return devices

    def _run_alone(self, tasks: Sequence[Task], tiles: Tiles | None, sizes: Sizes, finished: Finished) -> list[Outcome]:
        runner = self.prepare(sizes, tiles)

        def tell(outcome: Outcome) -> None:
            finished(outcome, Tiles(runner.tiling.sizes, runner.batch))

        images = [task for task in tasks if not task.is_video]
        outcomes = ImageRun(runner, self.settings.images, tell, self.listener.image_progress).run(images)
        for task in tasks:
            if task.is_video:
                outcomes.append(self.upscale_video_task(task, runner))
                tell(outcomes[-1])
        return outcomes

    def _run_shared(
        self, crew: Crew, tasks: Sequence[Task], tiles: Tiles | None, sizes: Sizes, finished: Finished
    ) -> list[Outcome]:
        samples = tuple(task for task in tasks if not task.is_video)[:_CALIBRATION_IMAGES]
        shared = SharedRun(crew, Job(self.settings, samples, tiles, sizes), self.listener)
        used = shared.agree(str(self.plan), self.network.digest)
        batch = used.batch or 1
        tiling = self.planner.tiling(used.sizes, batch)
        self._report_configuration(tiling, batch, f", {len(crew)} workers")
        return shared.run(tasks, tiling, self.network.scale, lambda outcome: finished(outcome, used))

    def upscale_video_task(self, task: Task, runner: TileRunner) -> Outcome:
        advance = partial(self.listener.video_progress, task)
        tiles = (runner.tiling.sizes, runner.batch)
        settings = replace(self.settings.videos, model=self.made_by, tiles=tiles, resume=self.settings.resume)
        state, scale = task.source_state(), self.network.scale
        enlarge, copies = WholeImages(runner), runner.copies
        try:
            video = upscale_video(task.source, task.target, enlarge, scale, settings, advance, copies)
        except Exception as error:
            is_known = isinstance(error, (RedlineError, OSError))
            if not is_known and not is_out_of_memory(error):
                raise
            message = str(error) if is_known else f"out of memory at {str(task.source)!r}: {runner.advice}."
            return Outcome(task, error=message, notes=notes_on_parts(task.target))
        return Outcome(task, video.width, video.height, video.seconds, video.notes, source_state=state)

    def prepare(self, sizes: Sizes, tiles: Tiles | None = None) -> TileRunner:
        """Returns the tile runner; chooses new tiles if the images are larger than planned."""
        runner = self.tile_runner
        outgrown = not self._planned_for or any(
            max(side) > max(planned)
            for side, planned in zip(zip(*sizes, strict=True), zip(*self._planned_for, strict=True), strict=True)
        )
        is_resumed_with_others = self.settings.resume and tiles and runner and tiles.sizes != runner.tiling.sizes
        if runner is None or outgrown or is_resumed_with_others:
            self._planned_for = tuple({*self._planned_for, *sizes})
            tiling, batch = self.planner.choose(self._planned_for, tiles)
            if runner is None or (runner.tiling, runner.batch) != (tiling, batch):
                self._report_configuration(tiling, batch)
                runner = self.make_tile_runner(tiling, batch)
        self.tile_runner = runner
        return runner

    def make_tile_runner(self, tiling: Tiling, batch: int) -> TileRunner:
        streams = self.settings.streams or _DEFAULT_STREAMS

        def say(text: str) -> None:
            self.listener.say(text)  # looked up at each call, because the next run may have another listener

        return TileRunner(self.network, self.plan, self.machine.device, tiling, batch, say, streams)

    def _report_configuration(self, tiling: Tiling, batch: int, workers: str = "") -> None:
        tiles = f"{batch} tile{'s' if batch > 1 else ''} of {tiling} at a time"
        self.listener.say(f"{self.network.name} on {self.machine.name} with {self.chosen}, {tiles}{workers}")


def _load(settings: UpscaleSettings, machine: Machine) -> tuple[Network, ChosenPlan]:
    if settings.weights is not None and settings.is_onnx:
        # ONNX Runtime runs the network instead of PyTorch, so no rung (optimization of a plan) applies to the network.
        network = load_onnx_network(settings.weights, settings.scale, settings.provider, machine.device)
        return network, ChosenPlan(Plan())
    network = load_network(settings.weights, settings.scale)
    return network, choose_plan("upscale", machine, settings.precision, settings.plan, network.module)
