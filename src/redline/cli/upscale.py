"""`redline upscale`: upscales images, videos and folders of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typer import Argument, Option

from redline.choices import PIXEL_LIMIT, UPSCALE_PRESETS
from redline.cli.console import fail, note, print_json, progress, results, wrote
from redline.cli.live_line import LiveLine
from redline.cli.options import AsJson, Device, Scale
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_seconds

if TYPE_CHECKING:
    from redline.upscale.tasks import Listener, Outcome, Task
    from redline.upscale.video.settings import VideoProgress


def upscale(
    paths: Annotated[
        list[str],
        Argument(
            metavar="PATH",
            help="Images, videos, or folders of them; then the output, unless --out names it. With two paths, the "
            "second is the output if it does not exist; with more paths, the last is the output if it does not exist "
            "and ends in a slash. To overwrite an existing image, use --out.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, Option("--out", "-o", help="The output file or folder (default: beside the source).")
    ] = None,
    scale: Scale = None,
    weights: Annotated[
        Path | None, Option("--weights", "-w", help="A .pth, .safetensors or exported .onnx file; sets the scale.")
    ] = None,
    preset: Annotated[str, Option(help=f"A set of options: {', '.join(UPSCALE_PRESETS)}.")] = "balanced",
    precision: Annotated[str, Option(help="auto, fp32, fp16, bf16 or int8.")] = "auto",
    plan: Annotated[Path | None, Option(help="The TOML file of a plan (default: one of the bundled plans).")] = None,
    provider: Annotated[str, Option(help="Execution provider for ONNX weights: cpu, cuda or tensorrt.")] = "cpu",
    tile: Annotated[str, Option(help="Tile size in pixels: 256, 384x256 (width × height), or auto.")] = "auto",
    tile_batch: Annotated[int | None, Option(help="Tiles per batch (default: from the available memory).")] = None,
    streams: Annotated[int | None, Option(help="CUDA streams: one computes, the others copy (default: 2).")] = None,
    memory: Annotated[str | None, Option(help="A limit on the memory for tiles, for example 6GiB.")] = None,
    device: Device = "auto",
    workers: Annotated[str, Option(help="Number of worker processes, or auto for one per GPU.")] = "auto",
    wrap: Annotated[
        bool, Option("--wrap", help="Images: treat them as seamless textures, which continue on the opposite edge.")
    ] = False,
    format: Annotated[str | None, Option(help="Images: png, jpeg, webp, tiff, avif (default: the source's).")] = None,
    quality: Annotated[int | None, Option(help="Images: the quality of JPEG, WebP and AVIF, 1 to 100.")] = None,
    strip: Annotated[bool, Option("--strip", help="Leave out metadata; colour profiles are kept.")] = False,
    resume: Annotated[bool, Option("--resume", help="Skip complete files, and continue incomplete videos.")] = False,
    max_pixels: Annotated[int, Option(help="Images: maximum number of pixels; larger ones are refused.")] = PIXEL_LIMIT,
    codec: Annotated[str, Option(help="Videos: auto, h264, hevc, av1, ffv1 …")] = "auto",
    crf: Annotated[
        float | None, Option(help="Videos: the quality of the encoder; lower is better; at most 51, or 63 (av1, vp9).")
    ] = None,
    keep_going: Annotated[
        bool, Option("--keep-going", help="Videos: write the readable part of a damaged video instead of failing.")
    ] = False,
    compare: Annotated[
        Path | None, Option(help="Also write a page, out.html, with a before/after slider for each image.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upscale images and videos without visible seams; colours, transparency and metadata are kept.

    Example: redline upscale photo.jpg
    Example: redline upscale photo.jpg large.png
    Example: redline upscale holidays/ -o large/ --resume
    """
    with uninterrupted_imports():
        from redline.upscale.arguments import read_arguments
        from redline.upscale.compare.page import check_page
        from redline.upscale.upscaler import Upscaler
        from redline.upscale.workers.torchrun import Rank
    if compare is not None:
        check_page(compare)
    upscaler = Upscaler(
        weights,
        scale=scale,
        preset=preset,
        precision=precision,
        plan=plan,
        provider=provider,
        tile=_tile(tile),
        tile_batch=tile_batch,
        streams=streams,
        memory=memory,
        device=device,
        workers=_whole_number("--workers", workers),
        wrap=wrap,
        strip=strip,
        quality=quality,
        max_pixels=max_pixels,
        codec=codec,
        crf=crf,
        keep_going=keep_going,
    )
    arguments = read_arguments(paths, out)
    rank = Rank.find()
    with LiveLine("reading the model …", shown=rank is None or rank.index == 0) as line:
        watch = _Watch(line, as_json)
        if arguments.note:
            note(arguments.note)
        outcomes = upscaler.run(
            arguments.sources, arguments.out, format=format, resume=resume, progress=watch.listener()
        )
    _print(outcomes, as_json)
    compared = compare is None or _compare(compare, outcomes)
    if any(outcome.error for outcome in outcomes) or not compared:
        raise typer.Exit(1)


def _compare(page: Path, outcomes: list[Outcome]) -> bool:
    """Writes the comparison page; returns whether this succeeded. A failure does not affect the upscaled files."""
    from redline.upscale.compare.page import write_comparison

    try:
        write_comparison(page, outcomes)
    except RedlineError as error:
        fail(str(error), "failed")
        return False
    wrote(page)
    return True


def _tile(text: str) -> int | tuple[int, int] | None:
    width, by, height = text.partition("x")
    if by and width.isdecimal() and height.isdecimal():
        return int(width), int(height)
    return _whole_number("--tile", text, " or a width and a height such as 384x256")


def _whole_number(option: str, text: str, otherwise: str = "") -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise RedlineError(f"{option} must be auto, a whole number{otherwise}, not {text!r}.")
    return int(text)


class _Watch:
    """Shows the progress of all files in the live line, and prints a line for each finished file."""

    def __init__(self, line: LiveLine, as_json: bool) -> None:
        self._line, self._as_json = line, as_json
        self._total = self._done = 0
        self._under_way: dict[Task, float] = {}
        self._resumed: dict[Task, float] = {}  # the share of a video that an earlier run finished
        self._noted: set[tuple[Task, str]] = set()

    def listener(self) -> Listener:
        from redline.upscale.tasks import Listener

        return Listener(note, self._finished, self._image, self._video, self.begin)

    def begin(self, tasks: Sequence[Task]) -> None:
        self._total = len(tasks)
        self._update()

    def _update(self, detail: str = "") -> None:
        done = self._done + sum(list(self._under_way.values()))
        before = sum(list(self._resumed.values()))
        self._line.count("upscaling", min(done, self._total), self._total, "file", detail, before=before)

    def _finished(self, outcome: Outcome) -> None:
        self._under_way.pop(outcome.task, None)
        if not outcome.seconds:  # skipped or refused: counting this file would make the estimated time left too short
            self._total -= 1
            self._resumed.pop(outcome.task, None)
            if outcome.skipped:  # the time of the checks, which run before any upscaling, must not count
                self._line.restart()
        else:
            self._done += 1
        if outcome.error:
            note(outcome.error)
        elif not outcome.skipped and not self._as_json:
            _print_result(outcome)
        self._note(outcome.task, outcome.notes)
        self._update()

    def _note(self, task: Task, notes: tuple[str, ...]) -> None:
        """Prints each note once: notes on a video come with its progress and again with its outcome."""
        for text in notes:
            if (task, text) not in self._noted:
                self._noted.add((task, text))
                note(f"{task.source.name}: {text}")

    def _image(self, task: Task, rows: float, total: int) -> None:
        self._under_way[task] = rows / total
        self._update(task.source.name)

    def _video(self, task: Task, video: VideoProgress) -> None:
        self._note(task, video.notes)
        rate = f", {video.frames_per_s:.3g} frames/s" if video.frames_per_s else ""
        left = f", {format_seconds(video.left_s)} left" if video.left_s and self._total > 1 else ""
        if video.frames_total:
            self._under_way[task] = video.frames_done / video.frames_total
            self._resumed[task] = video.frames_resumed / video.frames_total
        self._update(f"{task.source.name}: frame {video.frames_done} of {video.frames_total or '?'}{rate}{left}")


def _print_result(outcome: Outcome) -> None:
    # On a terminal, prints with the live line's console, which puts the results above that line.
    console = progress if results.is_terminal and progress.is_terminal else results
    size = f"{outcome.width} × {outcome.height}"
    said = f"{escape(str(outcome.task.target))}  {size}  {format_seconds(outcome.seconds)}"
    console.print(said, soft_wrap=True)


def _print(outcomes: list[Outcome], as_json: bool) -> None:
    if as_json:
        print_json(
            [{**asdict(o), "task": {"source": str(o.task.source), "target": str(o.task.target)}} for o in outcomes]
        )
        return
    failed, skipped = (sum(bool(getattr(o, name)) for o in outcomes) for name in ("error", "skipped"))
    if len(outcomes) > 1 or failed or skipped:
        counts = {"upscaled": len(outcomes) - failed - skipped, "already complete": skipped, "failed": failed}
        progress.print(", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "upscaled"))
        for outcome in outcomes:
            if outcome.error:
                fail(outcome.error, "failed")
