"""Compares the report page with a golden file."""

import re

from goldens import check_golden
from redline.stream.latency import STAGES, FrameTimes, Latency
from redline.stream.monitor import Sample
from redline.stream.report_page import StreamInfo, _charts, _facts, _headline, _rows, _tiles


def sample(second: int) -> Sample:
    stages = {stage: 0.001 * (number + 1) * (1 + second / 10) for number, stage in enumerate(STAGES)}
    drops = {} if second < 3 else {"compute busy": second, "source late": 1}
    return Sample(
        float(second), 25 * second, 24.5 + second % 3, 0.02, 0.03, 0.04 + second / 1000, 0.001, stages, stages, stages,
        drops, 0.1 * second, (200 + second) * 2**20, (210 + second) * 2**20,
    )  # fmt: skip


def test_the_report_matches_its_golden_file() -> None:
    latency = Latency(window=64)
    for number in range(100):
        times = [0.001 * (1 + number % 7) * stage for stage in range(1, 7)]
        latency.record(FrameTimes(*times, shown_s=number / 25))
    latency.drop("compute busy", 3)
    latency.drop("source late", 0)
    about = StreamInfo("a.mp4", "b.mp4", "tiny", "a CPU", "cpu", "bf16", "64×48", "strength 0.5", 1.25)
    lines = []
    for report in (latency.report(), latency.report_all(), Latency().report()):
        lines += [
            _headline(report, 3.96),
            *(str(tuple(tile)) for tile in _tiles(report, sample(9))),
            *map(str, _rows(report)),
        ]
    lines += map(str, _facts(about))
    for device in ("cpu", "cuda"):
        lines += [f"{chart.title}: {chart.note} {chart.legend}" for chart in _charts([sample(0)], device)]
    for chart in _charts([sample(second) for second in range(8)], "cpu"):
        narrow = re.findall(r"<svg.*?</svg>", str(chart.drawing), re.DOTALL)[0]
        lines += [f"{chart.title}: {chart.legend}", *re.sub(r"(?<=>)(?=<(?!/))", "\n", narrow).splitlines()]
    check_golden("stream_page.txt", "\n".join(lines) + "\n")
