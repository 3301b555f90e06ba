"""`upscale_video`: decodes, upscales and encodes at the same time, part by part, and joins the parts."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.errors import RedlineError
from redline.machine.pinned_copies import PendingCopy, PlainCopies
from redline.upscale.overlap import overlap
from redline.upscale.video.encoders import Encoder, choose_encoder
from redline.upscale.video.frames import Damage, Mark, digest, read_frames
from redline.upscale.video.parts import Frame, PartEnd, PartsFolder, PartWriter, describe_job, part_end_after
from redline.upscale.video.pixels import to_planes, to_rgb
from redline.upscale.video.probe import VideoInfo, probe
from redline.upscale.video.remux import Assembly, assemble
from redline.upscale.video.settings import VideoProgress, VideoResult, VideoSettings, target_format
from redline.upscale.video.streams import check_other_streams

# Maximum number of frames that are queued between two stages, which bounds the memory for a video of any length.
_WAITING_FRAMES = 2


# Upscales frames, applies the given function to the result, and returns what that function returns.
Enlarge = Callable[[Tensor, Callable[[Tensor], PendingCopy]], PendingCopy]


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

    `enlarge` is called in this thread with one frame, float32 RGB (1, 3, H, W) in [0, 1] on the device of `copies`. It
    calls `finish`, its second argument, with the finite floating-point result (1, 3, scale · H, scale · W), and returns
    what `finish` returns. `finish` converts the frame to the pixel format of the video on the device, so that only
    finished planes are copied to the host. `enlarge` may repeat the call after memory ran out.
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

    def finish(large: Tensor) -> PendingCopy:
        wanted = (1, 3, video.height * scale, video.width * scale)
        if tuple(large.shape) != wanted or not large.is_floating_point():
            raise RedlineError(
                f"the model returned shape {tuple(large.shape)} and dtype {large.dtype}, not {wanted} and floating "
                "point."
            )
        return _start_copy_to_host(large[0].float(), encoder, copies)

    def work(frame: Frame) -> Frame:
        packed = enlarge(frame.pixels.wait(), finish)
        frame.pixels.release()
        tell()
        return replace(frame, pixels=packed)

    tell()
    if not (finished and finished[-1].is_end):
        try:
            mark = finished[-1].mark if finished else None
            overlap(_frames(video, settings, damage, mark, copies), work, writer.write, _WAITING_FRAMES)
        except (Exception, KeyboardInterrupt):
            writer.abandon()  # closes the file before its folder is removed
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


def _frames(
    video: VideoInfo, settings: VideoSettings, damage: Damage, after: Mark | None, copies: PlainCopies
) -> Generator[Frame, None, None]:
    """Yields the frames, and sets `end` on the last frame of each part."""
    index = after.index if after else -1
    part_end = part_end_after(index + 1, settings.segment_frames)
    with closing(read_frames(video, damage, after)) as frames:
        following = next(frames, None)
        while (current := following) is not None:
            index += 1
            pixels = to_rgb(current.frame, video.colour)
            following, end = next(frames, None), None
            if following is None or index + 1 == part_end:
                part_end = part_end_after(index + 1, settings.segment_frames)
                end = PartEnd(digest(pixels), following is None, tuple(damage.notes.values()))
            yield Frame(copies.to_device(pixels[None]), current.pts, current.duration, end)


def _start_copy_to_host(frame: Tensor, encoder: Encoder, copies: PlainCopies) -> PendingCopy:
    if any(encoder.padded):
        frame = F.pad(frame[None], (0, encoder.padded[0], 0, encoder.padded[1]), mode="replicate")[0]
    planes = to_planes(frame, encoder.layout, encoder.colour)
    return copies.to_host(torch.cat([plane.reshape(-1) for plane in planes]))


def _progress(video: VideoInfo, done: int, resumed: int, elapsed_s: float, notes: tuple[str, ...]) -> VideoProgress:
    rate = (done - resumed) / elapsed_s if done > resumed and elapsed_s > 0 else None
    total = None if video.frames is None else max(video.frames, done)
    left_s = (total - done) / rate if rate and total is not None else None
    return VideoProgress(done, total, resumed, rate, left_s, notes)
