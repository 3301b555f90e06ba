"""Runs upscaling tasks: loads the network and plan, skips finished files, and does the rest alone or with workers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from redline.upscale.network import Network, load_network
from redline.upscale.onnx_network import load_onnx_network
from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings, describe, describe_network
from redline.upscale.tasks import Listener, Outcome, Task
from redline.upscale.tile_planner import Sizes, TilePlanner, digest_of_sizes
from redline.upscale.tile_runner import TileRunner
from redline.upscale.tiling import Tiling
from redline.upscale.video.parts import notes_on_parts, tiles_of_parts
from redline.upscale.video.run import upscale_video
from redline.upscale.video.settings import VideoProgress
from redline.upscale.whole_images import WholeImages
from redline.upscale.workers.crew import Crew, Job, start_crew, worker_devices
from redline.upscale.workers.shared_run import SharedRun
from redline.upscale.workers.split_image import is_large

Finished = Callable[[Outcome, Tiles], None]  # the outcome of a file, and the tiles of its run

# One stream computes and one copies.
_DEFAULT_STREAMS = 2
# The number of images that workers receive to calibrate on; all workers use the first readable one.
_CALIBRATION_IMAGES = 16


class Upscaling:
    """A loaded network with its plan, which runs any number of tasks.

    Starts the workers that `settings` ask for if there is enough work. A `crew` that exists already (the ranks of
    torchrun) does all the work of one run.
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
        """Returns an outcome for every task, in their order. Errors of one file become its outcome; others raise."""
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
            digest = digest_of_sizes(sizes)
            tiles = self.planner.known_tiles(sizes, self._tiles_of_earlier_run(tasks, journal, digest))
            finished = _Finishing(self.listener, journal, digest)
            try:
                outcomes |= {outcome.task: outcome for outcome in self._run(waiting, tiles, sizes, finished)}
            except KeyboardInterrupt:
                for task in waiting:
                    for note in notes_on_parts(task.target) if task.is_video else ():
                        self.listener.say(f"{task.source.name}: {note}")
                raise
        return [outcomes[task] for task in tasks]

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
        """Returns a device per worker: no more workers than files, unless a large image can be shared."""
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
        agreed = shared.agree(str(self.plan), self.network.digest)
        tiling = self.tiling(agreed.tiles, agreed.batch)
        self._report_configuration(tiling, agreed.batch, f", {len(crew)} workers")
        used = Tiles(tiling.sizes, agreed.batch)
        return shared.run(tasks, tiling, self.network.scale, lambda outcome: finished(outcome, used))

    def upscale_video_task(self, task: Task, runner: TileRunner) -> Outcome:
        def advance(progress: VideoProgress) -> None:
            self.listener.video_progress(task, progress)

        tiles = (runner.tiling.sizes, runner.batch)
        settings = replace(self.settings.videos, model=self.made_by, tiles=tiles, resume=self.settings.resume)
        state, scale = task.source_state(), self.network.scale
        try:
            video = upscale_video(
                task.source, task.target, WholeImages(runner), scale, settings, advance, runner.copies
            )
        except (RedlineError, OSError) as error:
            return Outcome(task, error=str(error), notes=notes_on_parts(task.target))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = f"out of memory at {str(task.source)!r}: {runner.advice}."
            return Outcome(task, error=message, notes=notes_on_parts(task.target))
        return Outcome(task, video.width, video.height, video.seconds, video.notes, source_state=state)

    def prepare(self, sizes: Sizes, tiles: Tiles | None = None) -> TileRunner:
        """Returns the tile runner; chooses tiles anew if images are larger than those it was planned for."""
        runner = self.tile_runner
        outgrown = not self._planned_for or any(
            max(side) > max(planned)
            for side, planned in zip(zip(*sizes, strict=True), zip(*self._planned_for, strict=True), strict=True)
        )
        is_resumed_with_others = self.settings.resume and tiles and runner and tiles.sizes != runner.tiling.sizes
        if runner is None or outgrown or is_resumed_with_others:
            self._planned_for = tuple({*self._planned_for, *sizes})
            tiling, batch = self.choose_tiles(self._planned_for, tiles)
            if runner is None or (runner.tiling, runner.batch) != (tiling, batch):
                self._report_configuration(tiling, batch)
                runner = self.make_tile_runner(tiling, batch)
        self.tile_runner = runner
        return runner

    def choose_tiles(self, sizes: Sizes, tiles: Tiles | None = None, sharing: int = 1) -> tuple[Tiling, int]:
        return self.planner.choose(sizes, tiles, sharing)

    def tiling(self, sizes: TileSizes, batch: int = 1) -> Tiling:
        return self.planner.tiling(sizes, batch)

    def make_tile_runner(self, tiling: Tiling, batch: int) -> TileRunner:
        streams = self.settings.streams or _DEFAULT_STREAMS
        return TileRunner(self.network, self.plan, self.machine.device, tiling, batch, self._say, streams)

    def _say(self, text: str) -> None:
        self.listener.say(text)  # looked up here, because the next run may have another listener

    def _report_configuration(self, tiling: Tiling, batch: int, workers: str = "") -> None:
        tiles = f"{batch} tile{'s' if batch > 1 else ''} of {tiling} at a time"
        self.listener.say(f"{self.network.name} on {self.machine.name} with {self.chosen}, {tiles}{workers}")


class _Finishing:
    """Reports the outcome of each file and writes it to the journal; a journal that cannot be written is a warning."""

    def __init__(self, listener: Listener, journal: Journal | None, digest: str) -> None:
        self._listener, self._journal, self._digest = listener, journal, digest
        self._journal_failed = False

    def __call__(self, outcome: Outcome, tiles: Tiles) -> None:
        if not outcome.error:
            self._warn_if_changed(outcome)
            if self._journal is not None:
                self._record(self._journal, outcome, tiles)
        self._listener.finished(outcome)

    def _warn_if_changed(self, outcome: Outcome) -> None:
        source, before = outcome.task.source, outcome.source_state
        if before is not None and outcome.task.source_state() != before:
            self._listener.say(f"{str(source)!r} changed while it was read; --resume will upscale it again")

    def _record(self, journal: Journal, outcome: Outcome, tiles: Tiles) -> None:
        try:
            journal.record(outcome.task, outcome.source_state, replace(tiles, chosen_for=self._digest))
        except OSError as error:
            if not self._journal_failed:
                reason = error.strerror or error
                self._listener.say(f"cannot write the journal: {reason}; --resume will upscale these files again")
            self._journal_failed = True


def _load(settings: UpscaleSettings, machine: Machine) -> tuple[Network, ChosenPlan]:
    if settings.weights is not None and settings.is_onnx:
        # ONNX Runtime runs the network, so no rung applies to it.
        network = load_onnx_network(settings.weights, settings.scale, settings.provider, machine.device)
        return network, ChosenPlan(Plan())
    network = load_network(settings.weights, settings.scale)
    return network, choose_plan("upscale", machine, settings.precision, settings.plan, network.module)
