"""The Python API of upscaling: `Upscaler`. The command line is a thin layer on top of it."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from redline.choices import PIXEL_LIMIT
from redline.errors import RedlineError
from redline.ladder.plan import Plan, read_plan
from redline.notation import parse_bytes
from redline.upscale.blend import bounded_whole_alpha
from redline.upscale.image_run import ImageRun
from redline.upscale.images.colour import unpremultiply
from redline.upscale.images.sink import Encoding
from redline.upscale.memory_images import ArrayTask, from_pil, read_file, to_pil
from redline.upscale.network import find_weights
from redline.upscale.session import Upscaling
from redline.upscale.settings import ImageSettings, UpscaleSettings, with_preset
from redline.upscale.tasks import Listener, Outcome, Task, find_tasks
from redline.upscale.tile_runner import WholeImages
from redline.upscale.video.encoders import check_encoding
from redline.upscale.video.settings import VideoSettings
from redline.upscale.workers.torchrun import Rank, gather, work_as

logger = logging.getLogger(__name__)

_DEFAULT_SCALE = 4
Progress = Callable[[Task, float], None]


class Upscaler:
    """Upscales images and videos with one network.

    Args:
        model: The name of a bundled network such as ``"drct-small-x4"``, or the path of a weight file (``.pth``,
            ``.safetensors`` or exported ``.onnx``). By default the bundled network for ``scale``.
        scale: The factor, 4 by default. It must match the factor of the weights.
        preset: ``"speed"``, ``"balanced"``, ``"memory"`` or ``"quality"``; other arguments take precedence.
        precision: ``"auto"``, ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"int8"``.
        plan: A plan of the ladder: an object, its one-line form, or the path of a TOML file.
        provider: The execution provider for an ONNX file: ``"cpu"``, ``"cuda"`` or ``"tensorrt"``.
        tile: The side of a tile, or its width and height; by default chosen from the available memory.
        tile_batch: How many tiles are computed at a time; by default chosen from the available memory.
        streams: CUDA streams: one computes, the others copy.
        memory: A limit on the memory for tiles, in bytes or as text such as ``"6GiB"``.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        workers: Processes that share the files of one `run`; by default one per GPU.
        wrap: Treat images as seamless textures, whose edges continue on the opposite side.
        strip: Leave out metadata, except what defines the colours.
        quality: The quality of JPEG, WebP and AVIF files, 1 to 100.
        max_pixels: The largest number of pixels of an image; larger images raise.
        codec: The video codec: ``"auto"``, ``"h264"``, ``"hevc"``, ``"av1"``, ``"ffv1"``, …
        crf: The quality of the video encoder; lower is better.
        keep_going: Write what can be read of a damaged video instead of failing.

    Example:
        >>> import numpy, redline
        >>> upscaler = redline.Upscaler("drct-small-x4", device="cpu")
        >>> upscaler.scale
        4
        >>> upscaler(numpy.zeros((24, 32, 3), numpy.uint8)).shape
        (96, 128, 3)

    The weights are loaded by the first call, or when `scale` or `plan` is read.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        scale: int | None = None,
        preset: str = "balanced",
        precision: str = "auto",
        plan: Plan | str | Path | None = None,
        provider: str = "cpu",
        tile: int | tuple[int, int] | None = None,
        tile_batch: int | None = None,
        streams: int | None = None,
        memory: int | str | None = None,
        device: str = "auto",
        workers: int | None = None,
        wrap: bool = False,
        strip: bool = False,
        quality: int | None = None,
        max_pixels: int = PIXEL_LIMIT,
        codec: str = "auto",
        crf: float | None = None,
        keep_going: bool = False,
    ) -> None:
        settings = UpscaleSettings(
            weights=None if model is None else find_weights(model),
            scale=scale,
            device=device,
            precision=precision,
            plan=None if plan is None else read_plan(plan),
            provider=provider,
            tile=tile,
            tile_batch=tile_batch,
            streams=streams,
            memory_bytes=parse_bytes(memory) if isinstance(memory, str) else memory,
            workers=workers,
            images=ImageSettings(wrap, strip, Encoding(quality=quality), max_pixels),
            videos=VideoSettings(codec=codec, crf=crf, keep_going=keep_going, strip=strip),
        )
        check_encoding(settings.videos)
        self.settings = with_preset(settings, preset)

    @cached_property
    def _session(self) -> Upscaling:
        return Upscaling(self.settings, Listener(say=logger.info))

    @property
    def scale(self) -> int:
        """The upscaling factor."""
        return self._session.network.scale

    @property
    def plan(self) -> Plan:
        """The optimizations that the network runs under."""
        runner = self._session.tile_runner
        return self._session.plan if runner is None else runner.plan

    @overload
    def __call__(self, image: str | Path | Image.Image) -> Image.Image: ...
    @overload
    def __call__(self, image: np.ndarray) -> np.ndarray: ...
    @overload
    def __call__(self, image: Tensor) -> Tensor: ...

    def __call__(self, image: str | Path | Image.Image | np.ndarray | Tensor) -> Image.Image | np.ndarray | Tensor:
        """Upscales one image and returns the same kind of object; for a path, a Pillow image.

        Args:
            image: The path of an image file, a Pillow image, a numpy array of shape (H, W) or (H, W, C) of uint8,
                uint16 or floating point, or a floating-point tensor of shape (C, H, W) or (B, C, H, W). Floating-point
                values are in [0, 1]. C is 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGBA).

        Returns:
            An image of the same kind, dtype, channels and device, `scale` times as large.

        Raises:
            RedlineError: The image cannot be read, has another shape or dtype, or memory runs out.

        Example:
            >>> import redline, torch
            >>> upscaler = redline.Upscaler(scale=2, device="cpu")
            >>> upscaler(torch.rand(1, 4, 16, 24)).shape
            torch.Size([1, 4, 32, 48])
        """
        if isinstance(image, Tensor):
            return self._upscale_tensor(image)
        if isinstance(image, np.ndarray):
            return self._upscale_array(image)
        if isinstance(image, Image.Image):
            samples, info = from_pil(image)
        elif isinstance(image, (str, Path)):
            samples, info = read_file(image, self.settings.images.max_pixels)
        else:
            raise RedlineError(f"cannot upscale a {type(image).__name__}: give a path, Pillow image, array or tensor.")
        return to_pil(self._upscale_samples(samples), info)

    def run(
        self,
        paths: str | Path | Sequence[str | Path],
        out: str | Path | None = None,
        *,
        format: str | None = None,
        resume: bool = False,
        progress: Listener | Progress | None = None,
    ) -> list[Outcome]:
        """Upscales files: images, videos, and folders of them, exactly as `redline upscale` does.

        Args:
            paths: Files and folders.
            out: A file for one source, else a folder. By default results are written beside the sources.
            format: The format of images: ``"png"``, ``"jpeg"``, ``"webp"``, ``"tiff"`` or ``"avif"``.
            resume: Skip complete files, and continue videos that an earlier run began.
            progress: Called with a task and the finished fraction of it, or a `Listener` with a callback for every
                kind of event. Callbacks may come from any thread.

        Returns:
            An outcome per file, in order. Errors of single files are in `Outcome.error` and do not raise.

        Raises:
            RedlineError: No file can be upscaled as asked, for example because `out` cannot hold the results.

        Example:
            >>> import redline
            >>> upscaler = redline.Upscaler(scale=2)
            >>> outcomes = upscaler.run("holidays/", "large/", resume=True)  # doctest: +SKIP
            >>> [outcome.task.target for outcome in outcomes if not outcome.error]  # doctest: +SKIP
        """
        listener = _listener(progress)
        rank = Rank.find()
        if rank is not None and self.settings.workers is not None:
            raise RedlineError("torchrun's ranks are the workers: leave out --workers.")
        if rank is not None and rank.index > 0:
            work_as(rank, self.settings.device)
            return []
        sources = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
        out = None if out is None else Path(out)
        # Finds problems before the model is loaded, which takes seconds. The scale is not known yet, so it may be wrong
        # in the file names of these tasks.
        tasks = find_tasks(sources, out, self.settings.scale or _DEFAULT_SCALE, format)
        if all(task.problem for task in tasks):
            return [Outcome(task, error=task.problem) for task in tasks]
        crew = gather(rank, self.settings.device) if rank is not None else None
        with crew or nullcontext():
            session = self._session
            session.settings, session.listener, session.crew = replace(self.settings, resume=resume), listener, crew
            tasks = find_tasks(sources, out, session.network.scale, format, listener.say)
            listener.started(tasks)
            for text in _options_without_effect(self.settings, format, tasks):
                listener.say(text)
            return session.run(tasks, _journal_folder(sources, tasks, out, resume))

    def _upscale_array(self, array: np.ndarray) -> np.ndarray:
        samples = array[..., None] if array.ndim == 2 else array
        if samples.ndim != 3 or not 1 <= samples.shape[2] <= 4:
            raise RedlineError(f"an array of shape {array.shape} is not an image: give (H, W) or (H, W, 1 to 4).")
        if np.issubdtype(array.dtype, np.floating):
            planes = torch.from_numpy(np.ascontiguousarray(samples, np.float32)).permute(2, 0, 1)
            large = self._upscale_floats(planes[None])[0].permute(1, 2, 0).cpu().numpy().astype(array.dtype)
        else:
            large = self._upscale_samples(samples)
        return large[..., 0] if array.ndim == 2 else large

    def _upscale_tensor(self, tensor: Tensor) -> Tensor:
        batch = tensor[None] if tensor.ndim == 3 else tensor
        if batch.ndim != 4 or not 1 <= batch.shape[1] <= 4 or not tensor.is_floating_point():
            raise RedlineError(
                f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} is not an image: give floating point of "
                "shape (C, H, W) or (B, C, H, W) with 1 to 4 channels."
            )
        large = self._upscale_floats(batch.detach()).to(tensor.device, tensor.dtype)
        return large[0] if tensor.ndim == 3 else large

    def _upscale_samples(self, samples: np.ndarray) -> np.ndarray:
        """Upscales samples (H, W, C) of uint8 or uint16, with the same result as for a file."""
        session, task = self._session, ArrayTask(samples=samples)
        with session.on_device():
            runner = session.prepare((session.planner.with_padding((samples.shape[1], samples.shape[0])),))
            (outcome,) = ImageRun(runner, self.settings.images).run([task])
        if outcome.error:
            raise RedlineError(outcome.error)
        return task.results[0]

    def _upscale_floats(self, batch: Tensor) -> Tensor:
        """Upscales a batch (B, C, H, W) in [0, 1] to float32, without rounding to integers."""
        session, wrap = self._session, self.settings.images.wrap
        if not batch.numel():
            raise RedlineError(f"a batch of shape {tuple(batch.shape)} has no pixels.")
        planes = batch.float().clamp(0, 1)
        has_alpha = planes.shape[1] in (2, 4)
        colour, alpha = (planes[:, :-1], planes[:, -1:]) if has_alpha else (planes, None)
        if alpha is not None:
            colour = colour * alpha
        with session.on_device():
            runner = session.prepare((session.planner.with_padding((batch.shape[3], batch.shape[2])),))
            upscale = WholeImages(runner, wrap)
            large = upscale(colour.expand(-1, 3, -1, -1), lambda tensor: tensor)
            large_alpha = None
            if alpha is not None:
                large_alpha = upscale(alpha.expand(-1, 3, -1, -1), lambda tensor: tensor)
                large_alpha = bounded_whole_alpha(large_alpha, alpha.to(large_alpha.device), self.scale, wrap)
                large_alpha = large_alpha.mean(1, keepdim=True)
                large = unpremultiply(large.to(large_alpha.device), large_alpha)
            large = (large.mean(1, keepdim=True) if colour.shape[1] == 1 else large).clamp(0, 1)
            return large if large_alpha is None else torch.cat([large, large_alpha], dim=1)


def _listener(progress: Listener | Progress | None) -> Listener:
    if progress is None:
        return Listener(say=logger.info)
    if isinstance(progress, Listener):
        return progress
    return Listener(
        say=logger.info,
        finished=lambda outcome: progress(outcome.task, 1.0),
        image_progress=lambda task, rows, total: progress(task, rows / total),
        video_progress=lambda task, video: progress(task, video.frames_done / (video.frames_total or math.inf)),
    )


def _journal_folder(sources: Sequence[Path], tasks: Sequence[Task], out: Path | None, resume: bool) -> Path | None:
    """Returns the folder of the journal. Without `resume`, a single image has none, because repeating it is quick."""
    if len(tasks) < 2 and not any(source.is_dir() for source in sources):
        return tasks[0].target.parent if resume or tasks[0].is_video else None
    return out if out is not None else tasks[0].target.parent


def _options_without_effect(settings: UpscaleSettings, format: str | None, tasks: Sequence[Task]) -> list[str]:
    images, videos = settings.images, settings.videos
    given = {
        "images": {
            "wrap": images.wrap,
            "format": format is not None,
            "quality": images.encoding.quality is not None,
            "max-pixels": images.max_pixels != PIXEL_LIMIT,
        },
        "videos": {"codec": videos.codec != "auto", "crf": videos.crf is not None, "keep-going": videos.keep_going},
    }
    there = {"videos" if task.is_video else "images" for task in tasks if not task.problem}
    return [
        f"--{name} has no effect: it is for {kind}, and there are only {', '.join(there)}"
        for kind in given.keys() - there
        for name, is_given in given[kind].items()
        if is_given and there
    ]
