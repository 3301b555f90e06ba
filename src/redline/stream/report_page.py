"""The result of a stream and its report page: latency by stage, throughput, drops and memory, as curves and a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.notation import format_bytes, format_seconds
from redline.pages import CURVE_COLORS, ChartCard, TextTable, Tile, render_page
from redline.pages.curves import Curve, draw_curves
from redline.pages.svg import format_tick
from redline.stream.latency import STAGES, Distribution, Report
from redline.stream.monitor import Sample

_COLUMNS = ("stage", "p50", "p95", "p99", "mean", "max")


@dataclass(frozen=True)
class StreamInfo:
    """Describes the stream that ran. `device` is the name of the device, and `device_type` is cuda or cpu."""

    source: str
    sink: str
    model: str
    device: str
    device_type: str
    plan: str
    size: str
    settings: str
    setup_s: float


@dataclass(frozen=True)
class StreamResult:
    """The result of a finished stream.

    `output` is the video file or folder that was written, if any. `complete` means that the source ended by itself,
    and `interrupted` that a signal or `Stream.stop` ended the stream. `faults` counts lost connections of the source.
    `samples` has one measurement per second, and `summary` covers all frames (None if there was no frame).
    """

    info: StreamInfo
    report: Report
    output: Path | None
    complete: bool
    interrupted: bool
    faults: int
    samples: tuple[Sample, ...]
    summary: Sample | None

    @property
    def frames(self) -> int:
        """The number of frames that reached the output."""
        return self.report.frames

    @property
    def frames_per_s(self) -> float:
        return self.report.frames_per_s

    @property
    def dropped(self) -> Mapping[str, int]:
        """The number of dropped frames by cause."""
        return self.report.drops

    @property
    def latency(self) -> Distribution:
        """Seconds from the capture of a frame to the end of its display: p50, p95, p99, mean and maximum."""
        return self.report.latency

    def write_report(self, path: str | Path) -> None:
        """Writes an HTML page with curves of latency, throughput, drops and memory."""
        if self.summary is None:
            raise RedlineError("the stream processed no frame, so there is nothing to report.")
        write_text(Path(path), render_stream_page(self.info, self.report, self.samples, self.summary))


def render_stream_page(about: StreamInfo, report: Report, samples: Sequence[Sample], summary: Sample) -> str:
    """Returns the HTML page. `samples` are drawn as curves; `summary` covers all frames."""
    return render_page(
        "redline.stream",
        "report_page.html.jinja",
        about=about,
        meta=f"{about.model} · {about.size} · {about.device}",
        headline=_headline(report, summary.time_s),
        tiles=_tiles(report, summary),
        charts=[chart for chart in _charts(samples, about.device_type) if chart.drawing],
        stages=TextTable("Latency by stage, as a table", _COLUMNS, tuple(_rows(report))),
        facts=_facts(about),
    )


def _headline(report: Report, lasted_s: float) -> str:
    lasted, latency = format_seconds(lasted_s), format_seconds(report.latency.p50_s)
    lost = sum(report.drops.values())
    dropped = f"{lost:,} dropped" if lost else "none dropped"
    return f"{report.frames:,} frames in {lasted}, median latency {latency}; {dropped}."


def _tiles(report: Report, summary: Sample) -> list[Tile]:
    latency = report.latency
    return [
        Tile("Frames per second", f"{report.frames_per_s:.1f}", f"over {report.window:,} frames"),
        Tile("Latency p50", format_seconds(latency.p50_s), f"p95 {format_seconds(latency.p95_s)}"),
        Tile("Latency p99", format_seconds(latency.p99_s), f"most {format_seconds(latency.most_s)}"),
        Tile("Jitter", format_seconds(report.jitter_s), "from frame to frame"),
        Tile("Dropped", f"{sum(report.drops.values()):,}", ", ".join(report.drops) or "nothing lost"),
        Tile("Memory", format_bytes(summary.peak_bytes), "maximum"),
        Tile("Device utilization", f"{summary.busy_share:.0%}", "of the time"),
    ]


def _charts(samples: Sequence[Sample], device_type: str) -> list[ChartCard]:
    def over(value: Callable[[Sample], float]) -> list[tuple[float, float]]:
        return [(sample.time_s, float(value(sample))) for sample in samples]

    causes = sorted({cause for sample in samples for cause in sample.drops})
    percentiles = {"p50": over(lambda s: s.p50_s), "p95": over(lambda s: s.p95_s), "p99": over(lambda s: s.p99_s)}
    stages = {_title(stage): over(lambda s, stage=stage: s.stages_p50_s[stage]) for stage in STAGES}
    rate, busy = {"shown": over(lambda s: s.frames_per_s)}, {"busy": over(lambda s: s.busy_share)}
    drops = {cause: over(lambda s, cause=cause: s.drops.get(cause, 0)) for cause in causes}
    memory = {"allocated": over(lambda s: s.memory_bytes / 2**20)}
    notes = {
        "latency": "From capture to display: percentiles over the window of the last frames.",
        "stages": "The median of each stage; each stage begins when the previous one ends.",
        "memory": "The memory of the process or, on a GPU, of its tensors.",
        "share": f"The share of the time in which {'the GPU' if device_type == 'cuda' else 'the CPU'} computed frames.",
    }
    return [
        _chart("Latency", notes["latency"], "latency", percentiles, format_seconds),
        _chart("Latency by stage", notes["stages"], "stages", stages, format_seconds),
        _chart("Frames per second", "Frames shown in each second.", "rate", rate),
        _chart("Dropped frames", "Total so far, by cause.", "drops", drops),
        _chart("Memory", notes["memory"], "memory", memory, lambda mib: f"{mib:,.4g} MiB"),
        _chart("Device utilization", notes["share"], "share", busy, lambda share: f"{share:.0%}", top=1.0),
    ]


def _chart(
    title: str,
    note: str,
    name: str,
    curves: dict[str, list[tuple[float, float]]],
    label: Callable[[float], str] = format_tick,
    top: float | None = None,
) -> ChartCard:
    drawn = [
        Curve(key, tuple(curve), f"c{number % CURVE_COLORS}") for number, (key, curve) in enumerate(curves.items())
    ]
    # A single curve needs no legend, because the title names it. The chart of drops always needs one, because its title
    # does not name the cause.
    legend = tuple((curve.kind, curve.name) for curve in drawn) if len(drawn) > 1 or name == "drops" else ()
    return ChartCard(title, note, draw_curves(title, drawn, name, "seconds", label, (0.0, top)), legend)


def _rows(report: Report) -> list[tuple[str, ...]]:
    spreads = [(_title(stage), report.stages[stage]) for stage in STAGES] + [("total", report.latency)]
    return [
        (name, *(format_seconds(getattr(spread, f)) for f in ("p50_s", "p95_s", "p99_s", "mean_s", "most_s")))
        for name, spread in spreads
    ]


def _facts(about: StreamInfo) -> list[tuple[str, str]]:
    return [
        ("Source", about.source),
        ("Sink", about.sink),
        ("Model", about.model),
        ("Size", about.size),
        ("Device", about.device),
        ("Plan", about.plan),
        ("Settings", f"{about.settings} (initially)"),
        ("Set-up time", format_seconds(about.setup_s)),
    ]


def _title(stage: str) -> str:
    return stage.replace("_", " ")
