"""`redline stream`: sends live video through a diffusion model."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typer import Argument, Option

from redline.cli.console import note, plain_table, print_json, progress, results, wrote
from redline.cli.live_line import LiveLine
from redline.cli.options import MODEL_HELP, PLAN_HELP, AsJson, Device, Sampler, Steps, Strength
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_bytes, format_seconds, parse_seconds
from redline.stream.choices import STREAM_PRECISIONS, STREAM_SINKS, STREAM_SOURCES
from redline.stream.metrics_file import check_output_path
from redline.stream.settings import parse_numbers
from redline.stream.viewer_key import KEY_VARIABLE

if TYPE_CHECKING:
    from redline.stream.monitor import Sample
    from redline.stream.report_page import StreamResult


_USAGE = """{missing}, as in

  redline stream webcam browser                     this machine's camera, shown on a local page
  redline stream video.mp4 restored.mp4             every frame of a video, with its audio
  redline stream rtsp://10.0.0.7/live mjpeg:8182    a network camera, for any browser or player

All sources, outputs and options: redline stream --help"""


def stream(
    source: Annotated[
        str | None, Argument(metavar="IN", help=escape(f"{STREAM_SOURCES[0].upper()}{STREAM_SOURCES[1:]}."))
    ] = None,
    sink: Annotated[
        str | None, Argument(metavar="OUT", help=escape(f"{STREAM_SINKS[0].upper()}{STREAM_SINKS[1:]}."))
    ] = None,
    model: Annotated[Path | None, Option("--model", "-m", help=f"{MODEL_HELP} (default: the bundled LSD).")] = None,
    sampler: Sampler = None,
    prompt: Annotated[str, Option(help="Text prompt of a diffusers pipeline.")] = "",
    steps: Steps = None,
    strength: Strength = None,
    seed: Annotated[int, Option(help="Seed of the noise, which is the same for every frame.")] = 0,
    control: Annotated[str, Option(help="The control vector, for example 0.5,1.")] = "",
    size: Annotated[str | None, Option(help="Resize input frames to this size, for example 512x512.")] = None,
    live: Annotated[bool, Option("--live", help="Play a file in real time, like a camera.")] = False,
    keep_going: Annotated[bool, Option("--keep-going", help="Skip damaged parts of a video and count them.")] = False,
    reset_at_cuts: Annotated[
        bool, Option("--reset-at-cuts", help="Clear the model's previous output when the scene changes.")
    ] = False,
    precision: Annotated[str, Option(help=f"Precision: {', '.join(STREAM_PRECISIONS)}.")] = "auto",
    plan: Annotated[str | None, Option(help=f"{PLAN_HELP} Default: a bundled plan.")] = None,
    device: Device = "auto",
    duration: Annotated[str | None, Option(help="Stop this long after the first frame, such as 30s, 5m or 1h.")] = None,
    changes: Annotated[
        str | None, Option(help="Read changed settings, such as strength=0.4 steps=2, from a file, pipe or - (stdin).")
    ] = None,
    key: Annotated[
        str | None,
        Option(
            help="Key that viewers must give; required to serve other machines. The process list shows a key given "
            f"here, but not one given with --key-file or in the environment variable {KEY_VARIABLE}."
        ),
    ] = None,
    key_file: Annotated[Path | None, Option(help="Read the key from the first line of this file.")] = None,
    certificate: Annotated[
        Path | None, Option(help="Serve the browser page over https with this PEM file (key and certificates).")
    ] = None,
    metrics: Annotated[Path | None, Option(help="Write metrics to this file, one JSON line per second.")] = None,
    report: Annotated[Path | None, Option(help="Write an HTML report with curves at the end.")] = None,
    as_json: AsJson = False,
) -> None:
    """Transform live video with a diffusion model, a frame or two behind the camera.

    Example: redline stream webcam browser
    Example: redline stream video.mp4 restored.mp4 --steps 2 --report stream.html
    """
    if source is None or sink is None:
        missing = "give a source (IN) and an output (OUT)" if source is None else f"give an output (OUT) for {source!r}"
        raise RedlineError(_USAGE.format(missing=missing))
    with uninterrupted_imports():
        from redline.stream.sources.video_file import DamagedVideo
        from redline.stream.stream import Stream
    if report is not None:
        others = {"source": source, "output": sink, "model": model, "list of changes": changes, "metrics file": metrics}
        check_output_path(report, others)
    try:
        with LiveLine("loading the model …") as line:
            running = Stream(
                source,
                sink,
                model=model,
                sampler=sampler,
                prompt=prompt,
                steps=steps,
                strength=strength,
                seed=seed,
                control=_numbers(control),
                size=_size(size),
                live=live,
                keep_going=keep_going,
                reset_at_cuts=reset_at_cuts,
                precision=precision,
                plan=plan,
                device=device,
                duration_s=None if duration is None else parse_seconds(duration),
                changes=changes,
                key=key,
                key_file=key_file,
                certificate=certificate,
                metrics=metrics,
                log=note,
            )
            for url in running.urls:
                progress.print(f"open [bold]{escape(url)}[/]", soft_wrap=True)
            line.update("setting up …")
            kind = "GPU" if running.device.type == "cuda" else "CPU"
            result = running.run(lambda sample: _show(line, sample, kind))
    except DamagedVideo as error:
        raise RedlineError(f"{error} Use --keep-going to skip the damage.") from error
    _print_json(result) if as_json else _print(result)
    if report is not None and not result.frames:
        note("no frame was processed, so there is no report")
    elif report is not None:
        result.write_report(report)
        wrote(report)
    # Ctrl-C is the normal end of live input, but leaves the output of a video file incomplete.
    if result.interrupted and not running.is_live:
        raise typer.Exit(130)


def _show(line: LiveLine, sample: Sample, kind: str) -> None:
    latency = "/".join(f"{1e3 * seconds:.3g}" for seconds in (sample.p50_s, sample.p95_s, sample.p99_s))
    stages = ", ".join(f"{stage.replace('_', ' ')} {1e3 * s:.2g}" for stage, s in sample.stages_p50_s.items())
    drops = ", ".join(f"{count:,} {cause}" for cause, count in sample.drops.items()) or "0"
    line.update(
        f"{sample.frames_per_s:.1f} frames/s, p50/p95/p99 {latency} ms, jitter {1e3 * sample.jitter_s:.2g} ms, "
        f"dropped {drops}, {kind} {sample.busy_share:.0%}, {format_bytes(sample.memory_bytes)}\n  {stages} ms"
    )


def _print(result: StreamResult) -> None:
    table = plain_table("stage", "p50", "p95", "p99", "mean", "max")
    for name, times in [*result.report.stages.items(), ("latency", result.latency)]:
        values = (times.p50_s, times.p95_s, times.p99_s, times.mean_s, times.most_s)
        table.add_row(name.replace("_", " "), *map(format_seconds, values))
    if result.frames:
        results.print(table)
    drops = ", ".join(f"{count:,} dropped ({cause})" for cause, count in result.dropped.items()) or "none dropped"
    speed = f"{result.frames:,} frame{'s' * (result.frames != 1)}, {result.frames_per_s:.1f} per second"
    model = f"{escape(result.info.model)} on {result.info.device}, {escape(result.info.plan)}"
    results.print(f"{speed}, {drops}; {model}", soft_wrap=True)


def _print_json(result: StreamResult) -> None:
    summary = result.summary
    print_json(
        {
            **asdict(result.info),
            "whole": result.complete,
            "interrupted": result.interrupted,
            "faults": result.faults,
            "seconds": summary.time_s if summary else 0.0,
            "peak_memory_bytes": summary.peak_bytes if summary else 0,
            "report": asdict(result.report),
        }
    )


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or "0" in (found[1], found[2]):
        raise RedlineError(f"invalid --size {text!r}: write width and height, as in 512x512.")
    return int(found[2]), int(found[1])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return parse_numbers(text)
    except ValueError as error:
        raise RedlineError(f"invalid --control {text!r}: write numbers separated by commas.") from error
