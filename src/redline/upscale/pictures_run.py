"""Pictures from disk to disk: reading, enlarging and writing overlap, and one bad file does not end the others.

What flows is bands: one row of tiles of one picture, in order. A picture that fails is given up where it failed, its
half-written file goes, and the next one is begun.
"""

import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.upscale.blend import Blender, enlarged_tiles
from redline.upscale.copies import Arriving
from redline.upscale.enlarger import Enlarger
from redline.upscale.listener import Outcome
from redline.upscale.overlap import overlap
from redline.upscale.padding import Framed, frame
from redline.upscale.pictures import (
    PictureSink,
    PictureSource,
    check_can_hold,
    create_picture,
    format_for,
    from_planes,
    open_picture,
    premultiply,
    to_planes,
    unpremultiply,
)
from redline.upscale.settings import PictureSettings
from redline.upscale.tasks import Task
from redline.upscale.workers.split_picture import Part, PartSink, first_needed

# Bands that may wait between two stages.
_WAITING_BANDS = 2


class _Picture:
    """A picture on its way: opened by the reader, blended by the worker, written by the writer."""

    def __init__(self, task: Task, enlarger: Enlarger, settings: PictureSettings) -> None:
        self.task, self.started = task, time.monotonic()
        if task.target.exists() and task.target.samefile(task.source):
            raise RedlineError(f"{str(task.target)!r} is the picture itself: choose another target.")
        self.source: PictureSource = open_picture(task.source, settings.pixel_limit, random_access=settings.wrap)
        self.scale = enlarger.network.scale
        self.width, self.height = self.scale * self.source.width, self.scale * self.source.height
        self.channels, self.bits = self.source.channels, self.source.bits
        # Asked before any work is done, because the answer may be no.
        check_can_hold(format_for(task.target), self.width, self.height, self.channels, self.bits)
        self.rows: Framed = frame(self.source.height, enlarger.cut, settings.wrap)
        self.columns: Framed = frame(self.source.width, enlarger.cut, settings.wrap)
        self.blender = Blender(self.rows.side, self.columns.side, self.scale, enlarger.device)
        # Which rows of tiles are wanted, and from where they are computed.
        self.first, self.last = (task.first, task.last) if isinstance(task, Part) else (0, len(self.rows.side.starts))
        self.begin = first_needed(self.rows.side, self.first, self.scale)
        self.sink: PictureSink | PartSink | None = None
        self.error = ""

    def band(self, row: int) -> np.ndarray:
        top = self.rows.side.starts[row]
        positions = self.rows.positions[top : top + self.rows.side.cut.tile]
        first, last = int(positions.min()), int(positions.max())
        return self.source.rows(first, last + 1)[(positions - first).numpy()]

    def inside(self, row: int, count: int) -> slice:
        """Which of the `count` rows that a row of tiles finished belong to the picture, or to this part of it."""
        if row < self.first:
            return slice(0, 0)
        begin = self.rows.side.starts[row] * self.scale
        whole = self.rows.inside(self.scale)
        return slice(max(whole.start - begin, 0), max(min(whole.stop - begin, count), 0))

    def outcome(self, error: str = "") -> Outcome:
        notes = (*self.source.notes, *(self.sink.notes if self.sink else ()))
        return Outcome(self.task, self.width, self.height, time.monotonic() - self.started, notes, error)


@dataclass(frozen=True)
class _Band:
    """A row of tiles to do, or its finished rows; without either, the picture's end or failure."""

    picture: _Picture
    row: int = 0
    samples: Arriving | None = None
    last: bool = False
    error: str = ""
    # Alpha that is the same everywhere stays so without the network.
    has_flat_alpha: bool = False


class PictureRun:
    """Enlarges many pictures; `tell` hears each outcome as it is known, `advance` how many rows of tiles are done."""

    def __init__(
        self,
        enlarger: Enlarger,
        settings: PictureSettings,
        tell: Callable[[Outcome], None] = lambda _outcome: None,
        advance: Callable[[Task, int, int], None] = lambda _task, _done, _total: None,
    ) -> None:
        self._enlarger, self._settings, self._tell, self._advance = enlarger, settings, tell, advance
        self._outcomes: list[Outcome] = []
        self._open: set[_Picture] = set()

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
                picture = _Picture(task, self._enlarger, self._settings)
                with picture.source:
                    samples = picture.band(0)
            except (RedlineError, OSError):
                continue
            colour, _ = self._planes(torch.from_numpy(samples).to(self._enlarger.device))
            next(iter(enlarged_tiles(colour[None], picture.columns, self._enlarger.checked_each, self._enlarger.batch)))
            return

    # Reading

    def _read(self, tasks: Iterable[Task]) -> Generator[_Band, None, None]:
        for task in tasks:
            try:
                picture = _Picture(task, self._enlarger, self._settings)
            except (RedlineError, OSError) as error:
                self._finish(Outcome(task, error=str(error)))
                continue
            self._open.add(picture)
            with picture.source:
                for row in range(picture.begin, picture.last):
                    if picture.error:
                        break
                    try:
                        samples = picture.band(row)
                    except RedlineError as error:
                        yield _Band(picture, error=str(error))
                        break
                    coming = self._enlarger.copies.bring_in(torch.from_numpy(samples))
                    flat = picture.channels in (2, 4) and bool((samples[..., -1] == samples[0, 0, -1]).all())
                    yield _Band(picture, row, coming, row == picture.last - 1, has_flat_alpha=flat)

    # Enlarging

    def _work(self, band: _Band) -> _Band:
        if band.samples is None:
            return band
        picture = band.picture
        if picture.error:
            band.samples.done()
            return replace(band, samples=None)
        colour, alpha = self._planes(band.samples.take())
        band.samples.done()
        tiles = self._tiles(colour[None], picture.columns)
        if alpha is not None:
            # All of colour before any of alpha: a precision that is left on the way is left at the same place always.
            of_colour = list(tiles)
            of_alpha = self._alpha_tiles(alpha, picture.columns, band.has_flat_alpha)
            tiles = (torch.cat(pair) for pair in zip(of_colour, of_alpha, strict=True))
        finished = picture.blender.blend(band.row, tiles)
        finished = finished[..., picture.inside(band.row, finished.shape[-2]), picture.columns.inside(picture.scale)]
        colour, alpha = finished[0], finished[1].mean(0, keepdim=True) if alpha is not None else None
        if alpha is not None:
            colour = unpremultiply(colour, alpha)
        self._advance(picture.task, max(band.row + 1 - picture.first, 0), picture.last - picture.first)
        rows = from_planes(colour, alpha, picture.channels, picture.bits)
        return _Band(picture, band.row, self._enlarger.copies.bring_out(rows), band.last)

    def _planes(self, samples: Tensor) -> tuple[Tensor, Tensor | None]:
        colour, alpha = to_planes(samples)
        return (colour if alpha is None else premultiply(colour, alpha)), alpha

    def _tiles(self, planes: Tensor, columns: Framed) -> Iterable[Tensor]:
        return enlarged_tiles(planes, columns, self._enlarger.checked_each, self._enlarger.batch)

    def _alpha_tiles(self, alpha: Tensor, columns: Framed, is_flat: bool) -> Iterable[Tensor]:
        """Alpha goes through the network too, as grey."""
        if is_flat:
            size = self._enlarger.cut.tile * self._enlarger.network.scale
            return [alpha[0, 0, 0].expand(1, 3, size, size)] * len(columns.side.starts)
        return self._tiles(alpha.expand(3, -1, -1)[None], columns)

    # Writing

    def _write(self, band: _Band, encoders: ThreadPoolExecutor, encoding: list[Future[None]]) -> None:
        picture = band.picture
        if picture.error:
            return
        try:
            if band.error:
                raise RedlineError(band.error)
            if picture.sink is None:
                picture.sink = self._create(picture)
            assert band.samples is not None
            picture.sink.write_rows(band.samples.take().numpy())
            band.samples.done()
        except (RedlineError, OSError) as error:
            self._give_up(picture, str(error))
            return
        if band.last:
            # Not more pictures at once than there are encoders: their rows are held in memory until then.
            waiting = [future for future in encoding if not future.done()]
            if len(waiting) >= self._settings.encoders:
                waiting[0].result()
            encoding.append(encoders.submit(self._encode, picture))

    def _create(self, picture: _Picture) -> PictureSink | PartSink:
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

    def _encode(self, picture: _Picture) -> None:
        assert picture.sink is not None
        try:
            picture.sink.finish()
        except (RedlineError, OSError) as error:
            self._give_up(picture, str(error))
            return
        self._open.discard(picture)
        self._finish(picture.outcome())

    def _give_up(self, picture: _Picture, error: str) -> None:
        picture.error = error
        if picture.sink is not None:
            picture.sink.abort()
        self._open.discard(picture)
        self._finish(picture.outcome(error))

    def _finish(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._tell(outcome)
