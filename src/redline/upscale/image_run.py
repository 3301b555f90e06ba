"""Upscales images, and overlaps reading, computing and writing.

The stages pass on bands, in order; a band is one row of tiles of one image. If an image fails, its incomplete file is
removed and the run continues with the next image.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.memory import is_out_of_memory
from redline.machine.pinned_copies import PendingCopy, PlainCopies
from redline.upscale.blend import Blender, bounded_alpha, enlarged_tiles
from redline.upscale.images.colour import from_planes, to_planes, unpremultiply
from redline.upscale.images.formats import check_can_hold, format_for
from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import ImageSource, open_image
from redline.upscale.memory_images import ArraySink, ArraySource, ArrayTask
from redline.upscale.overlap import overlap
from redline.upscale.settings import ImageSettings
from redline.upscale.tasks import Outcome, Task
from redline.upscale.tile_runner import OutOfMemory, TileRunner
from redline.upscale.tiling import Side, cut_side
from redline.upscale.workers.split_image import Part, PartSink, first_needed

# Maximum number of bands that are queued between two stages.
_WAITING_BANDS = 2


class ImageJob:
    """One image: opened by the reading thread, blended by the computing thread, and written by the writing thread."""

    def __init__(self, task: Task, tile_runner: TileRunner, settings: ImageSettings) -> None:
        self.task = task
        # Read before the file is opened, so that a file that is replaced in between is detected as changed.
        self.source_state = task.source_state()
        # The time when work on the image began; None while the image waits in the queue.
        self.started: float | None = None
        self.source = _open_source(task, settings)
        self.scale = tile_runner.network.scale
        self.width, self.height = self.scale * self.source.width, self.scale * self.source.height
        self.channels, self.bits = self.source.channels, self.source.bits
        if not isinstance(task, ArrayTask):
            # Raises before any work is done if the format cannot hold the result.
            check_can_hold(format_for(task.target), self.width, self.height, self.channels, self.bits)
        shape = tile_runner.tiling.shape_for((self.source.width, self.source.height), settings.wrap)
        self.rows: Side = cut_side(self.source.height, shape.rows, settings.wrap)
        self.columns: Side = cut_side(self.source.width, shape.columns, settings.wrap)
        self.blender = Blender(self.rows, self.columns, self.scale, tile_runner.device)
        # The rows of tiles to write, and `begin`, the first row of tiles that must be computed for them.
        self.first, self.last = (task.first, task.last) if isinstance(task, Part) else (0, len(self.rows.starts))
        self.begin = first_needed(self.rows, self.first, self.scale)
        self.sink: ImageSink | PartSink | ArraySink | None = None
        self.error = ""
        # If set, no more rows are read or computed. The writing thread reports the error.
        self.has_failed = False
        self.in_main_memory = False

    @property
    def band_pixels(self) -> int:
        """The number of pixels of one row of tiles, which is blended as a whole."""
        return self.rows.cut.tile * self.columns.padded

    def blend_in_main_memory(self) -> None:
        self.in_main_memory, self.blender.device = True, torch.device("cpu")

    def band(self, row: int) -> np.ndarray:
        top = self.rows.starts[row]
        positions = self.rows.positions_on("cpu")[top : top + self.rows.cut.tile]
        first, last = int(positions.min()), int(positions.max())
        return self.source.rows(first, last + 1)[(positions - first).numpy()]

    def inside(self, row: int) -> slice:
        """Returns which of the image rows that a row of tiles finishes must be written, as a slice of these rows.

        The slice excludes padding and rows that belong to other parts of the image.
        """
        if row < self.first:
            return slice(0, 0)
        begin, count = self.rows.starts[row] * self.scale, self.blender.finished_rows(row)
        whole = self.rows.inside(self.scale)
        return slice(max(whole.start - begin, 0), max(min(whole.stop - begin, count), 0))

    def outcome(self, error: str = "") -> Outcome:
        notes = (*self.source.notes, *(self.sink.notes if self.sink else ()))
        seconds = time.monotonic() - self.started if self.started is not None else 0.0
        return Outcome(self.task, self.width, self.height, seconds, notes, error, source_state=self.source_state)


def _open_source(task: Task, settings: ImageSettings) -> ImageSource | ArraySource:
    if isinstance(task, ArrayTask):
        return ArraySource(task.samples)
    if task.target.exists() and task.target.samefile(task.source):
        raise RedlineError(f"the output {str(task.target)!r} is the source image; choose another output.")
    return open_image(task.source, settings.max_pixels, random_access=settings.wrap)


@dataclass(frozen=True)
class _Band:
    """A row of tiles on its way through the stages.

    `samples` are source rows before computing and finished output rows after it; None if the image has failed.
    """

    image: ImageJob
    row: int = 0
    samples: PendingCopy | None = None
    last: bool = False
    error: str = ""
    # Whether alpha has one value everywhere; such alpha is filled in without the network.
    has_flat_alpha: bool = False


class ImageRun:
    """Upscales many images. Calls `tell` with every outcome, and `advance` with how many rows of tiles are done."""

    def __init__(
        self,
        tile_runner: TileRunner,
        settings: ImageSettings,
        tell: Callable[[Outcome], None] = lambda _outcome: None,
        advance: Callable[[Task, float, int], None] = lambda _task, _done, _total: None,
    ) -> None:
        self._tile_runner, self._settings, self._tell, self._advance = tile_runner, settings, tell, advance
        # The number of pixels of the smallest row of tiles that did not fit on the device.
        self._too_large = sys.maxsize
        self._outcomes: list[Outcome] = []
        self._open: set[ImageJob] = set()

    def run(self, tasks: Iterable[Task]) -> list[Outcome]:
        """Returns an outcome per task, in any order. Takes the next task when there is room to read it."""
        encoding: list[Future[None]] = []
        try:
            with ThreadPoolExecutor(self._settings.encoders, "encoding") as encoders:

                def write(band: _Band) -> None:
                    self._write(band, encoders, encoding)

                try:
                    overlap(self._read(tasks), self._work, write, _WAITING_BANDS)
                except BaseException:
                    # Encodings in progress finish, so that no incomplete file is left behind.
                    encoders.shutdown(cancel_futures=True)
                    raise
            for future in encoding:
                future.result()
        finally:
            for image in self._open:
                if image.sink is not None:
                    image.sink.abort()
        return self._outcomes

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Calibrates the plan: runs the first tiles of the first readable image."""
        for task in tasks:
            try:
                image = ImageJob(task, self._tile_runner, self._settings)
                with image.source:
                    samples = image.band(0)
            except (RedlineError, OSError):
                continue
            # The planes of the whole row stay in main memory, where a row of any width fits.
            colour, _ = self._planes(torch.from_numpy(samples))
            next(iter(self._tiles(colour[None], image.columns)))
            return

    # Reading

    def _read(self, tasks: Iterable[Task]) -> Generator[_Band, None, None]:
        for task in tasks:
            try:
                image = ImageJob(task, self._tile_runner, self._settings)
            except Exception as error:
                self._finish(Outcome(task, error=_message(error, task)))
                continue
            self._open.add(image)
            with image.source:
                for row in range(image.begin, image.last):
                    if image.has_failed:
                        break
                    try:
                        samples = image.band(row)
                    except Exception as error:
                        yield _Band(image, error=_message(error, task))
                        break
                    pending = self._tile_runner.copies.to_device(torch.from_numpy(samples))
                    flat = image.channels in (2, 4) and bool((samples[..., -1] == samples[0, 0, -1]).all())
                    yield _Band(image, row, pending, row == image.last - 1, has_flat_alpha=flat)

    # Computing

    def _work(self, band: _Band) -> _Band:
        if band.samples is None:
            return band
        image = band.image
        if image.has_failed:
            band.samples.release()
            return replace(band, samples=None)
        if image.started is None:
            image.started = time.monotonic()
        samples = band.samples.wait()
        if image.band_pixels >= self._too_large:
            image.blend_in_main_memory()
        taken_at_once = self._tile_runner.taken_at_once
        try:
            while (rows := self._try_rows(band, samples)) is None:
                self._make_room(image)
        except OutOfMemory as error:
            # Restores the batch size and the tiles, because the next images may fit in memory.
            self._tile_runner.taken_at_once = taken_at_once
            band.samples.release()
            image.has_failed = True
            return _Band(image, error=f"{str(image.task.source)!r}: {error}")
        band.samples.release()
        self._advance_to(image, band.row + 1)
        return _Band(image, band.row, rows, band.last)

    def _advance_to(self, image: ImageJob, rows: float) -> None:
        self._advance(image.task, max(rows - image.first, 0), image.last - image.first)

    def _counted(self, band: _Band, tiles: Iterable[Tensor], share: float) -> Iterator[Tensor]:
        """Yields the tiles of a row and reports progress. `share` is the fraction of the row's work in these tiles."""
        count = len(band.image.columns.starts)
        for number, tile in enumerate(tiles, 1):
            yield tile
            if number < count:  # the last tile is counted with the whole row
                self._advance_to(band.image, band.row + share * number / count)

    def _try_rows(self, band: _Band, samples: Tensor) -> PendingCopy | None:
        """Returns the pending copy of the finished rows; None if memory ran out but `_make_room` can help."""
        blender = band.image.blender
        carried = blender.carried
        try:
            return self._rows(band, samples.to(blender.device))
        except Exception as error:
            can_move = self._tile_runner.copies.has_device_memory and not band.image.in_main_memory
            if not is_out_of_memory(error) and not (isinstance(error, OutOfMemory) and can_move):
                raise
        blender.carried = carried
        return None

    def _rows(self, band: _Band, samples: Tensor) -> PendingCopy:
        image = band.image
        colour, alpha = self._planes(samples)
        share = 1.0 if alpha is None or band.has_flat_alpha else 0.5
        tiles: Iterable[Tensor] = self._counted(band, self._tiles(colour[None], image.columns), share)
        if alpha is not None:
            # Computes the colour of all tiles before their alpha. If both were computed in turns, the tile at which a
            # safer precision takes effect would depend on timing.
            place = image.blender.device
            of_colour = [tile.to(place) for tile in tiles]
            of_alpha = self._alpha_tiles(alpha, image, band.has_flat_alpha)
            tiles = (torch.cat(pair) for pair in zip(of_colour, of_alpha, strict=True))
        rows = self._blend_rows(band, tiles, alpha is not None)
        copies = PlainCopies() if image.in_main_memory else self._tile_runner.copies
        return copies.to_host(rows)

    def _blend_rows(self, band: _Band, tiles: Iterable[Tensor], has_alpha: bool) -> Tensor:
        """Returns the finished rows as samples.

        To save memory, no tensors except these samples and the blender's carried rows are as wide as the result.
        """
        image, rows = band.image, None
        inside, across = image.inside(band.row), image.columns.inside(image.scale)
        for columns, strip in image.blender.blend(band.row, tiles):
            begin, end = max(columns.start, across.start), min(columns.stop, across.stop)
            if begin >= end:
                continue
            strip = strip[..., inside, begin - columns.start : end - columns.start]
            colour, alpha = strip[0], strip[1].mean(0, keepdim=True) if has_alpha else None
            if alpha is not None:
                colour = unpremultiply(colour, alpha)
            samples = from_planes(colour, alpha, image.channels, image.bits)
            if rows is None:
                rows = samples.new_empty((len(samples), image.width, image.channels))
            rows[:, begin - across.start : end - across.start] = samples
        assert rows is not None
        return rows

    def _make_room(self, image: ImageJob) -> None:
        """Reduces the memory use after memory ran out.

        Moves the blending of the image to main memory, which costs the least. If the blending is already there,
        shrinks the batch or the tiles.
        """
        if image.in_main_memory or not self._tile_runner.copies.has_device_memory:
            self._tile_runner.shrink(image.rows.cut.tile, image.columns.cut.tile)
            return
        image.blend_in_main_memory()
        self._too_large = min(self._too_large, image.band_pixels)
        self._tile_runner.say(
            f"out of memory: from now on, images {image.source.width:,} pixels wide are blended in main memory"
        )

    def _planes(self, samples: Tensor) -> tuple[Tensor, Tensor | None]:
        colour, alpha = to_planes(samples)
        return (colour if alpha is None else colour * alpha), alpha

    def _tiles(self, planes: Tensor, columns: Side) -> Iterable[Tensor]:
        return enlarged_tiles([planes], columns, self._tile_runner.checked_each, self._tile_runner.batch)

    def _alpha_tiles(self, alpha: Tensor, image: ImageJob, is_flat: bool) -> Iterable[Tensor]:
        if is_flat:
            height, width = (side.cut.tile * image.scale for side in (image.rows, image.columns))
            return [alpha[0, 0, 0].expand(1, 3, height, width)] * len(image.columns.starts)
        enlarged = self._tiles(alpha.expand(3, -1, -1)[None], image.columns)
        return bounded_alpha(enlarged, alpha, image.columns, image.scale)

    # Writing

    def _write(self, band: _Band, encoders: ThreadPoolExecutor, encoding: list[Future[None]]) -> None:
        image = band.image
        if image.error:
            return
        if band.error:
            self._fail(image, band.error)
            return
        try:
            image.sink = image.sink or self._create(image)
            assert band.samples is not None
            image.sink.write_rows(band.samples.wait().numpy())
            band.samples.release()
        except Exception as error:
            self._fail(image, _message(error, image.task))
            return
        if band.last:
            # Keeps at most one unfinished image per encoder, because an image stays in memory until it is encoded.
            waiting = [future for future in encoding if not future.done()]
            if len(waiting) >= self._settings.encoders:
                waiting[0].result()
            encoding.append(encoders.submit(self._encode, image))

    def _create(self, image: ImageJob) -> ImageSink | PartSink | ArraySink:
        if isinstance(image.task, Part):
            return PartSink(image.task)
        if isinstance(image.task, ArrayTask):
            return ArraySink(image.task, image.width, image.height)
        shape = (image.width, image.height, image.channels, image.bits)
        settings, metadata = self._settings, image.source.metadata
        return ImageSink(image.task.target, *shape, settings.encoding, metadata, settings.strip)

    def _encode(self, image: ImageJob) -> None:
        assert image.sink is not None
        try:
            image.sink.finish()
        except Exception as error:
            self._fail(image, _message(error, image.task))
            return
        self._open.discard(image)
        self._finish(image.outcome())

    def _fail(self, image: ImageJob, error: str) -> None:
        image.error, image.has_failed = error, True
        if image.sink is not None:
            image.sink.abort()
        self._open.discard(image)
        self._finish(image.outcome(error))

    def _finish(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._tell(outcome)


def _message(error: Exception, task: Task) -> str:
    """Returns the message for an error of one image; raises any other error."""
    if is_out_of_memory(error):
        return f"out of memory at {str(task.source)!r}: free some memory."
    if isinstance(error, (RedlineError, OSError)):
        return str(error)
    raise error
