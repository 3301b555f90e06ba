"""`redline upscale`: images, folders and videos, several times larger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from redline.choices import PIXEL_LIMIT, UPSCALE_PRESETS
from redline.cli.console import print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_seconds, parse_bytes

if TYPE_CHECKING:
    from redline.upscale.listener import Listener, Outcome
    from redline.upscale.tasks import Task
    from redline.upscale.video import VideoProgress


def upscale(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Images, videos, or folders of them; then the output, unless --out names it. Of two paths, the second "
            "is the output if it does not exist; of more, the last if it does not exist and ends in a slash. To "
            "overwrite an existing image, use --out.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file, or a folder; beside the source by default.")
    ] = None,
    scale: Annotated[
        int | None, typer.Option("--scale", "-s", help="How many times larger; 4 by default, weights know theirs.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", "-w", help="A .pth, .safetensors or exported .onnx file; decides the scale."),
    ] = None,
    preset: Annotated[
        str, typer.Option(help=f"{', '.join(UPSCALE_PRESETS)}: settings that belong together.")
    ] = "balanced",
    precision: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16 or int8.")] = "auto",
    plan: Annotated[
        Path | None, typer.Option(help="A plan of the ladder to run under; a shipped one by default.")
    ] = None,
    provider: Annotated[str, typer.Option(help="What runs weights in ONNX: cpu, cuda or tensorrt.")] = "cpu",
    tile: Annotated[
        str, typer.Option(help="A tile in pixels, 256 or 384x256 (width and height), or auto: from the memory.")
    ] = "auto",
    tile_batch: Annotated[int | None, typer.Option(help="Tiles at a time; from the memory by default.")] = None,
    streams: Annotated[
        int | None, typer.Option(help="CUDA streams: one computes, the others copy meanwhile; 2 by default.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="How much memory tiles may take, 6GiB.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    workers: Annotated[str, typer.Option(help="Processes that share the work, or auto: one a GPU.")] = "auto",
    wrap: Annotated[
        bool, typer.Option("--wrap", help="Images: for seamless textures, edges go on at the other side.")
    ] = False,
    format: Annotated[
        str | None, typer.Option(help="Images: png, jpeg, webp, tiff or avif; as the source by default.")
    ] = None,
    quality: Annotated[int | None, typer.Option(help="Images: of JPEG, WebP and AVIF, 1 to 100.")] = None,
    strip: Annotated[bool, typer.Option("--strip", help="Leave out metadata; colours stay what they are.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Skip what is complete, and go on with videos.")] = False,
    max_pixels: Annotated[int, typer.Option(help="Images: refuse those with more pixels than this.")] = PIXEL_LIMIT,
    codec: Annotated[str, typer.Option(help="Videos: auto, h264, hevc, av1, ffv1 …")] = "auto",
    crf: Annotated[
        float | None, typer.Option(help="Videos: the encoder's quality, lower is better; to 51, or 63 of av1 and vp9.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Videos: of a damaged one, write what can be read instead of nothing.")
    ] = False,
    compare: Annotated[
        Path | None, typer.Option(help="Also write a page, out.html, with a before/after slider for each image.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of each file as JSON.")] = False,
) -> None:
    """Enlarge images and videos, without seams, with their colours, transparency and metadata.

    Example: redline upscale photo.jpg
    Example: redline upscale photo.jpg large.png
    Example: redline upscale holidays/ -o large/ --resume
    """
    with uninterrupted_imports():
        from redline.upscale.arguments import read_arguments
        from redline.upscale.compare import check_page
        from redline.upscale.images import Encoding
        from redline.upscale.listener import Outcome
        from redline.upscale.session import Upscaling
        from redline.upscale.settings import ImageSettings, UpscaleSettings, with_preset
        from redline.upscale.tasks import find_tasks
        from redline.upscale.video import VideoSettings, check_encoding
        from redline.upscale.workers.torchrun import Rank, gather, work_as
    settings = UpscaleSettings(
        weights=weights,
        scale=scale,
        device=device,
        precision=precision,
        plan=plan,
        provider=provider,
        tile=_tile(tile),
        tile_batch=tile_batch,
        streams=streams,
        memory_bytes=parse_bytes(memory) if memory else None,
        workers=_whole(workers, "workers are a whole number"),
        resume=resume,
        images=ImageSettings(wrap, strip, Encoding(quality=quality), max_pixels),
        videos=VideoSettings(codec=codec, crf=crf, keep_going=keep_going, strip=strip),
    )
    check_encoding(settings.videos)
    if compare is not None:
        check_page(compare)
    rank = Rank.find()
    if rank is not None and settings.workers is not None:
        raise RedlineError("under torchrun its ranks are the workers: leave out --workers.")
    if rank is not None and rank.index > 0:
        work_as(rank, device)
        return
    arguments = read_arguments(paths, out)
    sources, out = arguments.sources, arguments.out
    # Before the model is read, which takes seconds; its scale decides nothing but names.
    tasks = find_tasks(sources, out, scale or 4, format)
    if all(task.problem for task in tasks):
        _print([Outcome(task, error=task.problem) for task in tasks], as_json)
        raise typer.Exit(1)
    crew = gather(rank, device) if rank is not None else None
    with crew or nullcontext(), LiveLine("reading the model …") as line:
        watch = _Watch(line, as_json)
        if arguments.note:
            watch.say(arguments.note)
        upscaling = Upscaling(with_preset(settings, preset), watch.listener(), crew)
        tasks = find_tasks(sources, out, upscaling.network.scale, format, watch.say)
        watch.begin(tasks)
        for_pictures = {"wrap": wrap, "format": format is not None, "quality": quality is not None}
        for_pictures["max-pixels"] = max_pixels != PIXEL_LIMIT
        for_films = {"codec": codec != "auto", "crf": crf is not None, "keep-going": keep_going}
        for sentence in _without_effect(tasks, for_pictures, for_films):
            watch.say(sentence)
        journal = _journal_folder(sources, tasks, out, resume)
        outcomes = upscaling.run(tasks, journal)
    _print(outcomes, as_json)
    compared = compare is None or _compare(compare, tasks, outcomes)
    if any(outcome.error for outcome in outcomes) or not compared:
        raise typer.Exit(1)


def _compare(page: Path, tasks: list[Task], outcomes: list[Outcome]) -> bool:
    """Whether the page could be written; the images are done in any case."""
    from redline.upscale.compare import write_comparison

    place = {task: number for number, task in enumerate(tasks)}
    try:
        write_comparison(page, sorted(outcomes, key=lambda outcome: place[outcome.task]))
    except RedlineError as error:
        progress.print(f"[bold red]failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return False
    progress.print(f"wrote {escape(str(page))}", highlight=False, soft_wrap=True)
    return True


def _tile(text: str) -> int | tuple[int, int] | None:
    width, by, height = text.partition("x")
    if by and width.isdecimal() and height.isdecimal():
        return int(width), int(height)
    return _whole(text, "a tile is a width and a height such as 384x256, a whole number of pixels")


def _whole(text: str, what: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise RedlineError(f"{what} or auto, not {text!r}.")
    return int(text)


def _journal_folder(sources: Sequence[Path], tasks: list[Task], out: Path | None, resume: bool) -> Path | None:
    """Files are noted down as they are finished; a single image is done again as quickly, and needs no note."""
    if len(tasks) < 2 and not any(source.is_dir() for source in sources):
        return tasks[0].target.parent if resume or tasks[0].is_video else None
    return out if out is not None else tasks[0].target.parent


def _without_effect(tasks: list[Task], for_pictures: dict[str, bool], for_films: dict[str, bool]) -> list[str]:
    """A sentence for each option that was given for what is not there."""
    kinds = {task.is_video for task in tasks if not task.problem}
    said: list[str] = []
    if kinds == {True}:
        said = [f"--{name} is for images, and there are only videos" for name, given in for_pictures.items() if given]
    elif kinds == {False}:
        said = [f"--{name} is for videos, and there are only images" for name, given in for_films.items() if given]
    return said


class _Watch:
    """Counts files and how far those under way are in the live line, and prints a line for each that is finished."""

    def __init__(self, line: LiveLine, as_json: bool) -> None:
        self._line, self._as_json = line, as_json
        self._total = self._done = 0
        self._under_way: dict[Task, float] = {}
        self._resumed: dict[Task, float] = {}  # the share of a video that an earlier run did
        self._noted: set[tuple[Task, str]] = set()

    def listener(self) -> Listener:
        from redline.upscale.listener import Listener

        return Listener(self.say, self._finished, self._picture, self._film)

    def begin(self, tasks: list[Task]) -> None:
        self._total = len(tasks)
        self._update()

    def say(self, text: str) -> None:
        progress.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def _update(self, detail: str = "") -> None:
        done = self._done + sum(list(self._under_way.values()))
        before = sum(list(self._resumed.values()))
        self._line.count("enlarging", min(done, self._total), self._total, "file", detail, before=before)

    def _finished(self, outcome: Outcome) -> None:
        self._under_way.pop(outcome.task, None)
        if not outcome.seconds:  # skipped or refused in no time, which would make the time left too short
            self._total -= 1
            self._resumed.pop(outcome.task, None)
            if outcome.skipped:  # files are checked before the first one is enlarged
                self._line.restart()
        else:
            self._done += 1
        if outcome.error:
            self.say(outcome.error)
        elif not outcome.skipped and not self._as_json:
            _print_result(outcome)
        self._note(outcome.task, outcome.notes)
        self._update()

    def _note(self, task: Task, notes: tuple[str, ...]) -> None:
        """Each once: a video's are told as soon as they are known, and again with what became of it."""
        for note in notes:
            if (task, note) not in self._noted:
                self._noted.add((task, note))
                self.say(f"{task.source.name}: {note}")

    def _picture(self, task: Task, rows: float, total: int) -> None:
        self._under_way[task] = rows / total
        self._update(task.source.name)

    def _film(self, task: Task, video: VideoProgress) -> None:
        self._note(task, video.notes)
        rate = f", {video.frames_per_s:.3g} frames/s" if video.frames_per_s else ""
        left = f", {format_seconds(video.left_s)} left" if video.left_s and self._total > 1 else ""
        if video.frames_total:
            self._under_way[task] = video.frames_done / video.frames_total
            self._resumed[task] = video.frames_resumed / video.frames_total
        self._update(f"{task.source.name}: frame {video.frames_done} of {video.frames_total or '?'}{rate}{left}")


def _print_result(outcome: Outcome) -> None:
    # Where both are the same screen, the live line has to make room for it.
    console = progress if results.is_terminal and progress.is_terminal else results
    size = f"{outcome.width} × {outcome.height}"
    said = f"{escape(str(outcome.task.target))}  {size}  {format_seconds(outcome.seconds)}"
    console.print(said, highlight=False, soft_wrap=True)


def _print(outcomes: list[Outcome], as_json: bool) -> None:
    if as_json:
        print_json(
            [{**asdict(o), "task": {"source": str(o.task.source), "target": str(o.task.target)}} for o in outcomes]
        )
        return
    failed, skipped = (sum(bool(getattr(o, name)) for o in outcomes) for name in ("error", "skipped"))
    if len(outcomes) > 1 or failed or skipped:
        done = len(outcomes) - failed - skipped
        said = [
            f"{done} enlarged",
            *([f"{skipped} already complete"] if skipped else []),
            *([f"{failed} failed"] if failed else []),
        ]
        progress.print(", ".join(said), highlight=False)
        for outcome in outcomes:
            if outcome.error:
                progress.print(f"[bold red]failed:[/] {escape(outcome.error)}", highlight=False, soft_wrap=True)
