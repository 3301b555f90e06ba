"""The result of a stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.stream.latency import Distribution, Report
from redline.stream.monitor import Sample
from redline.stream.report_page import StreamInfo, render_stream_page


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
