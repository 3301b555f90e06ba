"""Pictures from disk to disk: reading, enlarging and writing overlap, and one bad file does not end the others.

What flows is bands: one row of tiles of one picture, in order. A picture that fails is given up where it failed, its
half-written file goes, and the next one is begun.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.memory import is_out_of_memory
from redline.machine.pinned_copies import Arriving, PlainCopies
from redline.upscale.alpha import bounded_alpha
from redline.upscale.blend import enlarged_tiles
from redline.upscale.image_job import PictureUnderWay
from redline.upscale.images import (
    PictureSink,
    create_picture,
    from_planes,
    premultiply,
    to_planes,
    unpremultiply,
)
from redline.upscale.listener import Outcome
from redline.upscale.overlap import overlap
from redline.upscale.padding import Framed
from redline.upscale.settings import PictureSettings
from redline.upscale.tasks import Task
from redline.upscale.tile_runner import Enlarger, OutOfMemory
from redline.upscale.workers.split_picture import Part, PartSink

# Bands that may wait between two stages.
_WAITING_BANDS = 2


@dataclass(frozen=True)
class _Band:
    """A row of tiles to do, or its finished rows; without either, the picture's end or failure."""

    picture: PictureUnderWay
    row: int = 0
    samples: Arriving | None = None
    last: bool = False
    error: str = ""
    # Alpha that is the same everywhere stays so without the network.
    has_flat_alpha: bool = False


class PictureRun:
    """Enlarges many pictures; `tell` hears each outcome as it is known, `advance` how many rows of tiles are done, and
    which share of the row under way."""

    def __init__(
        self,
        enlarger: Enlarger,
        settings: PictureSettings,
        tell: Callable[[Outcome], None] = lambda _outcome: None,
        advance: Callable[[Task, float, int], None] = lambda _task, _done, _total: None,
    ) -> None:
        self._enlarger, self._settings, self._tell, self._advance = enlarger, settings, tell, advance
        # Rows of tiles with as many pixels as this did not fit on the device.
        self._too_large = sys.maxsize
        self._outcomes: list[Outcome] = []
        self._open: set[PictureUnderWay] = set()

    def run(self, tasks: Iterable[Task]) -> list[Outcome]:
        """One outcome for each task, in no particular order; the next task is asked for when it can be read."""
        encoding: list[Future[None]] = []
        try:
            with ThreadPoolExecutor(self._settings.encoders, "encoding") as encoders:

                def write(band: _Band) -> None:
                    self._write(band, encoders, encoding)

                try:
                    overlap(self._read(tasks), self._work, write, _WAITING_BANDS)
                except BaseException:
                    # What is being encoded is let finish: taken away from its encoder, a file could be left behind.
                    encoders.shutdown(cancel_futures=True)
                    raise
            for future in encoding:
                future.result()
        finally:
            for picture in self._open:
                if picture.sink is not None:
                    picture.sink.abort()
        return self._outcomes

    def prepare(self, tasks: Iterable[Task]) -> None:
        """Runs the first tiles of the first picture that can be read, which are what a plan is calibrated on."""
        for task in tasks:
            try:
                picture = PictureUnderWay(task, self._enlarger, self._settings)
                with picture.source:
                    samples = picture.band(0)
            except (RedlineError, OSError):
                continue
            # From main memory, where a row of any width fits.
            colour, _ = self._planes(torch.from_numpy(samples))
            next(iter(self._tiles(colour[None], picture.columns)))
            return

    # Reading

    def _read(self, tasks: Iterable[Task]) -> Generator[_Band, None, None]:
        for task in tasks:
            try:
                picture = PictureUnderWay(task, self._enlarger, self._settings)
            except Exception as error:
                self._finish(Outcome(task, error=_sentence(error, task)))
                continue
            self._open.add(picture)
            with picture.source:
                for row in range(picture.begin, picture.last):
                    if picture.is_lost:
                        break
                    try:
                        samples = picture.band(row)
                    except Exception as error:
                        yield _Band(picture, error=_sentence(error, task))
                        break
                    coming = self._enlarger.copies.bring_in(torch.from_numpy(samples))
                    flat = picture.channels in (2, 4) and bool((samples[..., -1] == samples[0, 0, -1]).all())
                    yield _Band(picture, row, coming, row == picture.last - 1, has_flat_alpha=flat)

    # Enlarging

    def _work(self, band: _Band) -> _Band:
        if band.samples is None:
            return band
        picture = band.picture
        if picture.is_lost:
            band.samples.done()
            return replace(band, samples=None)
        if picture.started is None:
            picture.started = time.monotonic()
        samples = band.samples.take()
        if picture.band_pixels >= self._too_large:
            picture.blend_in_main_memory()
        taken_at_once = self._enlarger.taken_at_once
        try:
            while (rows := self._try_rows(band, samples)) is None:
                self._make_room(picture)
        except OutOfMemory as error:
            # What one picture finds no room for does not slow down those that follow.
            self._enlarger.taken_at_once = taken_at_once
            band.samples.done()
            picture.is_lost = True
            return _Band(picture, error=f"{str(picture.task.source)!r}: {error}")
        band.samples.done()
        self._advance_to(picture, band.row + 1)
        return _Band(picture, band.row, rows, band.last)

    def _advance_to(self, picture: PictureUnderWay, rows: float) -> None:
        self._advance(picture.task, max(rows - picture.first, 0), picture.last - picture.first)

    def _counted(self, band: _Band, tiles: Iterable[Tensor], share: float) -> Iterator[Tensor]:
        """The tiles of a row, each counted when it is done; together they are this share of the row's work."""
        count = len(band.picture.columns.side.starts)
        for number, tile in enumerate(tiles, 1):
            yield tile
            if number < count:  # the last is counted with the whole row
                self._advance_to(band.picture, band.row + share * number / count)

    def _try_rows(self, band: _Band, samples: Tensor) -> Arriving | None:
        """The rows that the band finishes, on their way to the host; None where memory runs out around the network."""
        blender = band.picture.blender
        carried = blender.carried
        try:
            return self._rows(band, samples.to(blender.device))
        except Exception as error:
            can_leave = self._enlarger.copies.has_own_memory and not band.picture.in_main_memory
            if not is_out_of_memory(error) and not (isinstance(error, OutOfMemory) and can_leave):
                raise
        blender.carried = carried
        return None

    def _rows(self, band: _Band, samples: Tensor) -> Arriving:
        picture = band.picture
        colour, alpha = self._planes(samples)
        share = 1.0 if alpha is None or band.has_flat_alpha else 0.5
        tiles: Iterable[Tensor] = self._counted(band, self._tiles(colour[None], picture.columns), share)
        if alpha is not None:
            # All of colour before any of alpha: a precision that is left on the way is left at the same place always.
            place = picture.blender.device
            of_colour = [tile.to(place) for tile in tiles]
            of_alpha = self._alpha_tiles(alpha, picture, band.has_flat_alpha)
            tiles = (torch.cat(pair) for pair in zip(of_colour, of_alpha, strict=True))
        rows = self._put_together(band, tiles, alpha is not None)
        copies = PlainCopies() if picture.in_main_memory else self._enlarger.copies
        return copies.bring_out(rows)

    def _put_together(self, band: _Band, tiles: Iterable[Tensor], has_alpha: bool) -> Tensor:
        """The finished rows as samples, which with what is carried are all that is held at a picture's full width."""
        picture, rows = band.picture, None
        inside, across = picture.inside(band.row), picture.columns.inside(picture.scale)
        for columns, strip in picture.blender.blend(band.row, tiles):
            begin, end = max(columns.start, across.start), min(columns.stop, across.stop)
            if begin >= end:
                continue
            strip = strip[..., inside, begin - columns.start : end - columns.start]
            colour, alpha = strip[0], strip[1].mean(0, keepdim=True) if has_alpha else None
            if alpha is not None:
                colour = unpremultiply(colour, alpha)
            samples = from_planes(colour, alpha, picture.channels, picture.bits)
            if rows is None:
                rows = samples.new_empty((len(samples), picture.width, picture.channels))
            rows[:, begin - across.start : end - across.start] = samples
        assert rows is not None
        return rows

    def _make_room(self, picture: PictureUnderWay) -> None:
        """First the rows of tiles are put together in main memory, which costs least; then the network takes less."""
        if picture.in_main_memory or not self._enlarger.copies.has_own_memory:
            self._enlarger.shrink(picture.rows.side.cut.tile, picture.columns.side.cut.tile)
            return
        picture.blend_in_main_memory()
        self._too_large = min(self._too_large, picture.band_pixels)
        self._enlarger.say(
            f"out of memory: pictures {picture.source.width:,} pixels wide are put together in main memory from now on"
        )

    def _planes(self, samples: Tensor) -> tuple[Tensor, Tensor | None]:
        colour, alpha = to_planes(samples)
        return (colour if alpha is None else premultiply(colour, alpha)), alpha

    def _tiles(self, planes: Tensor, columns: Framed) -> Iterable[Tensor]:
        return enlarged_tiles([planes], columns, self._enlarger.checked_each, self._enlarger.batch)

    def _alpha_tiles(self, alpha: Tensor, picture: PictureUnderWay, is_flat: bool) -> Iterable[Tensor]:
        if is_flat:
            height, width = (side.side.cut.tile * picture.scale for side in (picture.rows, picture.columns))
            return [alpha[0, 0, 0].expand(1, 3, height, width)] * len(picture.columns.side.starts)
        enlarged = self._tiles(alpha.expand(3, -1, -1)[None], picture.columns)
        return bounded_alpha(enlarged, alpha, picture.columns, picture.scale)

    # Writing

    def _write(self, band: _Band, encoders: ThreadPoolExecutor, encoding: list[Future[None]]) -> None:
        picture = band.picture
        if picture.error:
            return
        if band.error:
            self._give_up(picture, band.error)
            return
        try:
            if picture.sink is None:
                picture.sink = self._create(picture)
            assert band.samples is not None
            picture.sink.write_rows(band.samples.take().numpy())
            band.samples.done()
        except Exception as error:
            self._give_up(picture, _sentence(error, picture.task))
            return
        if band.last:
            # Not more pictures at once than there are encoders: their rows are held in memory until then.
            waiting = [future for future in encoding if not future.done()]
            if len(waiting) >= self._settings.encoders:
                waiting[0].result()
            encoding.append(encoders.submit(self._encode, picture))

    def _create(self, picture: PictureUnderWay) -> PictureSink | PartSink:
        if isinstance(picture.task, Part):
            return PartSink(picture.task)
        return create_picture(
            picture.task.target,
            picture.width,
            picture.height,
            picture.channels,
            picture.bits,
            self._settings.encoding,
            picture.source.metadata,
            self._settings.strip,
        )

    def _encode(self, picture: PictureUnderWay) -> None:
        assert picture.sink is not None
        try:
            picture.sink.finish()
        except Exception as error:
            self._give_up(picture, _sentence(error, picture.task))
            return
        self._open.discard(picture)
        self._finish(picture.outcome())

    def _give_up(self, picture: PictureUnderWay, error: str) -> None:
        picture.error, picture.is_lost = error, True
        if picture.sink is not None:
            picture.sink.abort()
        self._open.discard(picture)
        self._finish(picture.outcome(error))

    def _finish(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._tell(outcome)


def _sentence(error: Exception, task: Task) -> str:
    """What is said of a failure that concerns one picture; any other goes on its way."""
    if is_out_of_memory(error):
        return f"out of memory at {str(task.source)!r}: free some."
    if isinstance(error, (RedlineError, OSError)):
        return str(error)
    raise error
