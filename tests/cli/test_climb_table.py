"""The ladder as a table: the reference of each ratio, and the shape of each time."""

import io

import pytest
from rich.console import Console

from goldens import check_golden
from ladder.report.synthetic_climb import cpu_climb, h200_climb
from redline.cli.ladder_table import climb_tables
from redline.ladder.measurement import Measurement
from redline.ladder.statistics import median
from redline.notation import format_seconds


def printed(measurements: list[Measurement], width: int) -> str:
    page = io.StringIO()
    Console(width=width, file=page).print(climb_tables(measurements, width))
    return page.getvalue()


@pytest.mark.parametrize("width", [120, 200])
def test_each_ratio_is_beside_its_reference_time(width: int) -> None:
    climb = cpu_climb()
    kept = next(m for m in climb if m.rung == "fold_batchnorm")
    header, *lines = printed(climb, width).splitlines()
    assert header.index("Time per step") < header.index("Last plan") < header.index("Over last")
    line = next(line for line in lines if line.startswith("fold_batchnorm"))
    assert line[: header.index("Last plan") + 9].rstrip().endswith(format_seconds(median(kept.against_samples[""])))


def test_shapes_are_named_with_their_results() -> None:
    text = printed(h200_climb(shapes=("size=64", "size=96")), 200)
    assert "Times are for size=64; ratios are the geometric mean over size=64 and size=96." in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("size=64 ", "size=96 "))]
    assert len(rows) == 2 and all(4.5 < float(row[7].rstrip("×")) < 5.4 for row in rows)
    assert "All figures are for size=64." in printed(h200_climb(shapes=("size=64",)), 200)
    assert "size" not in printed(h200_climb(), 200)


@pytest.mark.parametrize("width", [110, 200])
def test_every_cell_is_complete(width: int) -> None:
    text = printed(h200_climb(shapes=("size=64", "size=96")), width) + printed(cpu_climb(), width)
    check_golden(f"ladder_table_{width}.txt", "".join(f"{line.rstrip()}\n" for line in text.splitlines()))
