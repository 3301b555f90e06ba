"""`upscale_video`: decodes, upscales and encodes at the same time, part by part, and joins the parts."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.pinned_copies import PendingCopy, PlainCopies
from redline.upscale.overlap import overlap
from redline.upscale.video.encoders import Encoder, choose_encoder
from redline.upscale.video.frames import Damage, Decoded, Mark, digest, read_frames
from redline.upscale.video.parts import PartsFolder, describe_job, part_end_after
from redline.upscale.video.pixels import to_planes, to_rgb
from redline.upscale.video.probe import VideoInfo, probe
from redline.upscale.video.remux import Assembly, assemble
from redline.upscale.video.settings import VideoProgress, VideoResult, VideoSettings, target_format
from redline.upscale.video.streams import check_other_streams
from redline.upscale.video.writer import Enlarged, PartEnd, PartWriter, Planes


class Enlarge(Protocol):
    def __call__(self, frames: Tensor, finish: Callable[[Tensor], list[Planes]], /) -> list[Planes]: ...


@dataclass(frozen=True)
class Batch:
    """Frames to upscale, float32 (N, 3, H, W). All frames of a batch belong to one part."""

    pixels: PendingCopy
    pts: list[int]
    durations: list[int]
    end: PartEnd | None


def upscale_video(
    source: Path,
    target: Path,
    enlarge: Enlarge,
    scale: int,
    settings: VideoSettings,
    progress: Callable[[VideoProgress], None],
    copies: PlainCopies = PlainCopies(),  # noqa: B008
) -> VideoResult:
    """Writes `target` completely or not at all.

    `enlarge` is called in this thread with float32 RGB (N, 3, H, W) in [0, 1] on the device of `copies`, with at most
    `settings.batch` frames. It calls `finish`, its second argument, with the finite floating-point result
    (N, 3, scale · H, scale · W), and returns its result. `finish` converts frames to the pixel format of the video on
    the device, so that only finished planes are copied to the host. `enlarge` may repeat the call after memory ran out.
    """
    started = time.perf_counter()
    video = probe(source)
    if target.exists() and target.samefile(source):
        raise RedlineError(f"the output {target.name!r} is the source video; choose another output.")
    if target.is_dir():
        raise RedlineError(f"the output {str(target)!r} is a folder: give a file name.")
    encoder, notes = choose_encoder(settings, video, target, scale)
    check_other_streams(source, video.stream_index, target_format(target))
    folder = PartsFolder(target)
    finished, unused = folder.start(describe_job(video, encoder, settings, scale), settings.resume)
    writer = PartWriter(folder, video, encoder, finished)
    resumed = writer.frames_done
    damage = Damage(source.name, settings.keep_going, {note: note for part in finished for note in part.notes})
    known = (*video.notes, *notes, *unused)
    work_started = time.perf_counter()

    def tell() -> None:
        progress(_progress(video, writer.frames_done, resumed, time.perf_counter() - work_started, known))

    def work(batch: Batch) -> Enlarged:
        made = _enlarged(enlarge, batch, video, encoder, scale, copies)
        tell()
        return made

    tell()
    if not (finished and finished[-1].is_end):
        try:
            mark = finished[-1].mark if finished else None
            overlap(_batches(video, settings, damage, mark, copies), work, writer.write, settings.waiting)
        except (Exception, KeyboardInterrupt):
            writer.abandon()
            if not writer.parts:  # there is nothing to resume from
                folder.remove()
            raise
        finally:
            writer.abandon()
    if not writer.parts:
        folder.remove()
        raise RedlineError(f"cannot read {source.name!r}: it has no readable frame.")
    found = assemble(Assembly(video, encoder, scale, folder, writer.parts, settings.strip), target)
    folder.remove()
    tell()
    return VideoResult(
        target,
        writer.frames_done,
        resumed,
        encoder.width,
        encoder.height,
        encoder.name,
        time.perf_counter() - started,
        tuple(dict.fromkeys((*known, *damage.notes.values(), *found))),
    )


def _batches(
    video: VideoInfo, settings: VideoSettings, damage: Damage, after: Mark | None, copies: PlainCopies
) -> Generator[Batch, None, None]:
    """Yields batches of frames that end where a part ends, so that a resumed run forms the same batches."""
    gathered: list[tuple[Tensor, Decoded]] = []
    index = after.index if after else -1
    part_end = part_end_after(index + 1, settings.segment_frames)
    with closing(read_frames(video, damage, after)) as frames:
        current = next(frames, None)
        while current is not None:
            index += 1
            gathered.append((to_rgb(current.frame, video.colour), current))
            current = next(frames, None)
            ends_part = current is None or index + 1 == part_end
            if not ends_part and len(gathered) < settings.batch:
                continue
            end = None
            if ends_part:
                part_end = part_end_after(index + 1, settings.segment_frames)
                end = PartEnd(digest(gathered[-1][0]), current is None, tuple(damage.notes.values()))
            pixels = copies.to_device(torch.stack([pixels for pixels, _ in gathered]))
            yield Batch(pixels, [shown.pts for _, shown in gathered], [shown.duration for _, shown in gathered], end)
            gathered.clear()


def _enlarged(
    enlarge: Enlarge, batch: Batch, video: VideoInfo, encoder: Encoder, scale: int, copies: PlainCopies
) -> Enlarged:
    wanted = (len(batch.pts), 3, video.height * scale, video.width * scale)

    def finish(large: Tensor) -> list[Planes]:
        if tuple(large.shape) != wanted or not large.is_floating_point():
            raise RedlineError(f"the model gave {tuple(large.shape)} {large.dtype} instead of {wanted} floating point.")
        return [_start_copy_to_host(frame.float(), encoder, copies) for frame in large]

    planes = enlarge(batch.pixels.wait(), finish)
    batch.pixels.release()
    return Enlarged(planes, batch.pts, batch.durations, batch.end)


def _start_copy_to_host(frame: Tensor, encoder: Encoder, copies: PlainCopies) -> Planes:
    if any(encoder.padded):
        frame = F.pad(frame[None], (0, encoder.padded[0], 0, encoder.padded[1]), mode="replicate")[0]
    planes = to_planes(frame, encoder.layout, encoder.colour)
    packed = copies.to_host(torch.cat([plane.reshape(-1) for plane in planes]))
    return Planes(packed, [tuple(plane.shape) for plane in planes])


def _progress(video: VideoInfo, done: int, resumed: int, elapsed_s: float, notes: tuple[str, ...]) -> VideoProgress:
    rate = (done - resumed) / elapsed_s if done > resumed and elapsed_s > 0 else None
    total = None if video.frames is None else max(video.frames, done)
    left_s = (total - done) / rate if rate and total is not None else None
    return VideoProgress(done, total, resumed, rate, left_s, notes)
