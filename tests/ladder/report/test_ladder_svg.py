"""The ladder as a standalone SVG file."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from ladder.report.synthetic_climb import cpu_climb, h200_climb, training_climb
from redline.ladder.report import Climb, climb_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(document).iter(f"{SVG}text")]


def bars(document: str) -> dict[str, float]:
    """The width of the widest bar of each color."""
    widths: dict[str, float] = {}
    for bar in ElementTree.fromstring(document).iter(f"{SVG}rect"):
        kind = bar.attrib["class"]
        widths[kind] = max(widths.get(kind, 0.0), float(bar.attrib["width"]))
    return widths


def test_kept_rungs_have_bars_and_dropped_rungs_have_reasons():
    climb = Climb.of(h200_climb())
    shown = texts(climb_svg(climb))
    assert shown[:2] == ["unet-880m on NVIDIA H200", climb.headline()]
    assert {"eager", "+ bf16", "final plan", "int8(scheme=dynamic)"} <= set(shown)
    assert any("4.94×" in text for text in shown)
    assert any(text.startswith("refused: ") for text in shown)
    assert shown[-1].startswith("Not tried: ")


def test_bars_are_as_long_as_the_gain():
    climb = Climb.of(cpu_climb())
    widths = bars(climb_svg(climb))
    assert widths["final"] / widths["base"] == pytest.approx(climb.entries[-1].row.over_start, rel=0.01)


def test_memory_is_the_gain_of_a_climb_for_memory():
    climb = Climb.of(training_climb())
    assert climb.subject.objective == "memory"
    widths = bars(climb_svg(climb))
    assert climb.baseline is not None and climb.final is not None
    before, after = climb.baseline.row.peak_bytes, climb.final.row.peak_bytes
    assert before and after and widths["final"] / widths["base"] == pytest.approx(before / after, rel=0.01)


def test_names_are_escaped_and_nothing_is_loaded():
    evil = "<script>alert(1)</script>"
    document = climb_svg(Climb.of([replace(m, workload=evil, reason=evil, rung=m.rung and evil) for m in cpu_climb()]))
    assert "<script" not in document and "href" not in document
    assert f"{evil} on Neoverse-N1" in texts(document)


def test_an_unfinished_climb_is_drawn():
    assert "eager" in texts(climb_svg(Climb.of(h200_climb()[:1])))
