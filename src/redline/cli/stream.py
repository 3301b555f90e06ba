"""`redline stream`: live video through a diffusion model, from a camera, a film or the network to where it is seen."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from redline.choices import SAMPLER_NAMES, STREAM_PRECISIONS, STREAM_SINKS, STREAM_SOURCES
from redline.cli.console import print_json, progress, results
from redline.cli.live_line import LiveLine
from redline.cli.plans import PLAN_HELP, read_plan
from redline.cli.signals import uninterrupted_imports
from redline.errors import RedlineError
from redline.notation import format_bytes, format_seconds, parse_seconds
from redline.stream.keys import KEY_VARIABLE, read_key
from redline.stream.settings_reader import numbers

if TYPE_CHECKING:
    from redline.stream.monitor import Sample
    from redline.stream.stream import Request, Result, Session


_HOW_TO_CALL = """{missing}, as in

  redline stream webcam browser                     this machine's camera, shown on a local page
  redline stream video.mp4 restored.mp4             every frame of a video, with its sound
  redline stream rtsp://10.0.0.7/live mjpeg:8182    a network camera, for any browser or player

All inputs, outputs and options: redline stream --help"""


def stream(
    source: Annotated[
        str | None, typer.Argument(metavar="IN", help=escape(f"{STREAM_SOURCES[0].upper()}{STREAM_SOURCES[1:]}."))
    ] = None,
    sink: Annotated[
        str | None, typer.Argument(metavar="OUT", help=escape(f"{STREAM_SINKS[0].upper()}{STREAM_SINKS[1:]}."))
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", help="Weights of an LSD, a folder of its training, or a diffusers pipeline; else shipped."
        ),
    ] = None,
    sampler: Annotated[str | None, typer.Option(help=f"{', '.join(SAMPLER_NAMES)}; distilled by default.")] = None,
    prompt: Annotated[str, typer.Option(help="What to show, for a diffusers pipeline.")] = "",
    steps: Annotated[int | None, typer.Option(help="Steps a frame; as the model was made by default.")] = None,
    strength: Annotated[
        float | None, typer.Option(help="Strength of the change, 0 to 1 (default: the model's).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise, which is the same for every frame.")] = 0,
    control: Annotated[str, typer.Option(help="The control vector, as in 0.5,1.")] = "",
    size: Annotated[str | None, typer.Option(help="Scale frames to this, 512x512; the source's by default.")] = None,
    live: Annotated[bool, typer.Option("--live", help="A film comes at its own pace, as from a camera.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Leave out what is damaged in a film, and count it.")
    ] = False,
    reset_at_cuts: Annotated[
        bool, typer.Option("--reset-at-cuts", help="Forget the last output when the scene changes.")
    ] = False,
    precision: Annotated[str, typer.Option(help=f"{', '.join(STREAM_PRECISIONS)}.")] = "auto",
    plan: Annotated[str | None, typer.Option(help=f"{PLAN_HELP} A shipped one by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = "auto",
    duration: Annotated[str | None, typer.Option(help="Stop so long after the first frame: 30s, 5m, 1h.")] = None,
    changes: Annotated[
        str | None,
        typer.Option(
            help="Change settings meanwhile: lines as strength=0.4 steps=2, from a file, a pipe, or - (stdin)."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Key that viewers must give; required to serve other machines. The process list shows it, unlike "
            f"--key-file and the environment variable {KEY_VARIABLE}."
        ),
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="Read the key from the first line of this file.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Serve the browser's page as https: a PEM file with a key and certificates.")
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="Write the figures of each second as JSON lines.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with the curves at the end, out.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures at the end as JSON.")] = False,
) -> None:
    """Transform live video with a diffusion model, a frame or two behind the camera.

    Example: redline stream webcam browser
    Example: redline stream film.mp4 restored.mp4 --steps 2 --report stream.html
    """
    if source is None or sink is None:
        raise RedlineError(_how_to_call(source))
    with uninterrupted_imports():
        from redline.stream.endpoints import EndpointOptions, serves_viewers
        from redline.stream.sources.video_file import DamagedVideo
        from redline.stream.stream import Request
    request = Request(
        source=source,
        sink=sink,
        model=model,
        sampler=sampler,
        prompt=prompt,
        steps=steps,
        strength=strength,
        seed=seed,
        control=_numbers(control),
        wishes=EndpointOptions(
            _size(size), live, read_key(key, key_file, serves_viewers(source, sink)), certificate, keep_going
        ),
        precision=precision,
        plan=None if plan is None else read_plan(plan),
        device=device,
        reset_at_cuts=reset_at_cuts,
        duration_s=None if duration is None else parse_seconds(duration),
        metrics=metrics,
        report=report,
        changes=changes,
    )
    try:
        session, result = _run(request)
    except DamagedVideo as error:
        raise RedlineError(f"{error} Use --keep-going to process what is there.") from error
    _print_json(result) if as_json else _print(result)
    if report is not None and not result.outcome.report.frames:
        _say("no frame came, so there is nothing to report")
    elif report is not None:
        session.write_report(result)
        progress.print(f"wrote {escape(str(report))}", highlight=False, soft_wrap=True)
    # A camera has no other end than Ctrl-C; a film that was stopped is not whole.
    if result.interrupted and not session.places.source.is_live:
        raise typer.Exit(130)


def _run(request: Request) -> tuple[Session, Result]:
    from redline.stream.stream import Session

    with LiveLine("reading the model …") as line:
        session = Session(request, _say)
        for address in session.places.addresses:
            progress.print(f"open [bold]{escape(address)}[/]", highlight=False, soft_wrap=True)
        line.update("setting up …")
        kind = "GPU" if session.device.type == "cuda" else "CPU"
        return session, session.run(lambda sample: _show(line, sample, kind))


def _how_to_call(source: str | None) -> str:
    missing = "say where video comes from (IN) and where it goes (OUT)"
    return _HOW_TO_CALL.format(missing=missing if source is None else f"say where {source!r} goes (OUT)")


def _say(sentence: str) -> None:
    progress.print(f"[dim]{escape(sentence)}[/]", highlight=False)


def _show(line: LiveLine, sample: Sample, kind: str) -> None:
    from redline.stream.latency import STAGES

    latency = "/".join(f"{1e3 * seconds:.3g}" for seconds in (sample.p50_s, sample.p95_s, sample.p99_s))
    stages = ", ".join(f"{stage.replace('_', ' ')} {1e3 * sample.stages_p50_s[stage]:.2g}" for stage in STAGES)
    drops = ", ".join(f"{count:,} {cause}" for cause, count in sample.drops.items()) or "0"
    line.update(
        f"{sample.frames_per_s:.1f} frames/s, p50/p95/p99 {latency} ms, jitter {1e3 * sample.jitter_s:.2g} ms, "
        f"dropped {drops}, {kind} {sample.busy_share:.0%}, {format_bytes(sample.memory_bytes)}\n  {stages} ms"
    )


def _print(result: Result) -> None:
    from redline.stream.latency import STAGES

    report = result.outcome.report
    table = Table("stage", "p50", "p95", "p99", "mean", "most", box=None, pad_edge=False)
    for name, spread in [*((stage, report.stages[stage]) for stage in STAGES), ("latency", report.latency)]:
        values = (spread.p50_s, spread.p95_s, spread.p99_s, spread.mean_s, spread.most_s)
        table.add_row(name.replace("_", " "), *map(format_seconds, values))
    if report.frames:
        results.print(table)
    drops = ", ".join(f"{count:,} dropped ({cause})" for cause, count in report.drops.items()) or "none dropped"
    results.print(
        f"{report.frames:,} frame{'s' * (report.frames != 1)}, {report.frames_per_s:.1f} a second, {drops}; "
        f"{escape(result.about.model)} on {result.about.device}, {escape(result.about.plan)}",
        highlight=False,
        soft_wrap=True,
    )


def _print_json(result: Result) -> None:
    outcome, whole = result.outcome, result.whole
    print_json(
        {
            **asdict(result.about),
            "whole": outcome.whole,
            "interrupted": result.interrupted,
            "faults": outcome.faults,
            "seconds": whole.time_s if whole else 0.0,
            "peak_memory_bytes": whole.peak_bytes if whole else 0,
            "report": asdict(outcome.report),
        }
    )


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or "0" in (found[1], found[2]):
        raise RedlineError(f"a size is a width and a height, as in 512x512, not {text!r}.")
    return int(found[2]), int(found[1])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return numbers(text)
    except ValueError as error:
        raise RedlineError(f"a control vector is numbers with commas between them, not {text!r}.") from error
