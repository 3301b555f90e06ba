"""The pages: well-formed, self-contained, harmless whatever a name holds, whole however little there is."""

import doctest
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import redline
import redline.ladder.report
from ladder.report.synthetic_climb import cpu_climb, h200_climb, training_climb, without_ceilings
from redline.ladder.measurement import Measurement, append
from redline.ladder.report import Climb, render_html, render_markdown
from redline.ladder.report.climb import interleaved_eager_s
from redline.ladder.report.tables import all_tables

EVIL = "<script>alert(1)</script>|`*_[x](javascript:1)\n# &amp; \"'"


def stripped(measurements, **changes):
    return [replace(m, **changes) for m in measurements]


def failed_only():
    return [Measurement("w", "eager", "baseline", "failed", "ran out of memory", {})]


CASES = {
    "h200": h200_climb(),
    "shapes": h200_climb(shapes=("size=64", "size=96", "size=128")),
    "cpu": cpu_climb(),
    "training": training_climb(),
    "baseline only": h200_climb()[:1],
    "interrupted": h200_climb()[:9],
    "no ceilings": without_ceilings(cpu_climb()),
    "no baseline": cpu_climb()[3:6],
    "baseline failed": failed_only(),
    "bench": stripped(cpu_climb()[:2], role="bench"),
    "no machine": stripped(cpu_climb(), machine={}),
    "one sample": [
        replace(
            m,
            samples={s: v[:1] for s, v in m.samples.items()},
            against_samples={s: v[:1] for s, v in m.against_samples.items()},
        )
        for m in cpu_climb()
    ],
    "no scores": stripped(cpu_climb(), scores=()),
    "no memory": stripped(cpu_climb(), peak_bytes=0, weight_bytes=0, setup_s={}),
    "constant": stripped(cpu_climb()[:1], samples={"": (0.1, 0.1, 0.1)}),
}


class Tags(HTMLParser):
    """Checks that tags close in order, and collects what a page would load or run."""

    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.ids, self.loads = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        self.loads += [
            value for key, value in attrs if key in ("src", "href", "xlink:href", "action") or key.startswith("on")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()


def parse(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


@pytest.mark.parametrize("case", CASES)
def test_every_climb_makes_a_whole_page(case):
    page = render_html(Climb.of(CASES[case]))
    tags = parse(page)
    assert "script" not in tags.seen and tags.loads == []
    assert len(tags.ids) == len(set(tags.ids))
    assert not re.search(r"@import|url\(", page)
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(drawing)
        assert root.attrib["role"] == "img" and root.find("title") is not None and root.find("desc") is not None
        assert not re.search(r'="[^"]*\b(nan|inf)\b', drawing)
    assert not re.search(r">\s*(nan|inf|None)\b", page)


@pytest.mark.parametrize("case", CASES)
def test_every_climb_makes_markdown_with_even_tables(case):
    text = render_markdown(Climb.of(CASES[case]))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().splitlines()}
        assert len(counts) == 1
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_page_contains_all_sections():
    page = render_html(Climb.of(h200_climb()))
    for words in (
        "The ladder", "Speed against relative error", "The roofline", "Distributions of the samples",
        "What each rung is worth", "Rungs not kept, and why", "Set-up and break-even", "Memory",
        "Proof that each rung took effect",
        "NVIDIA H200", "torch 2.11.0+cu128", "redline climb unet-880m", "[[rung]]", "16,780 calls",
        "ran out of memory: 142 GiB", "879,412,484 weights converted",
    ):  # fmt: skip
        assert words in page, words
    assert "By input shape" not in page
    assert "size=128" in render_html(Climb.of(CASES["shapes"]))


def test_result_is_compared_with_the_interleaved_eager_time():
    """The machine was four times slower when the climb began: no gain may come from that."""
    calm = h200_climb(shapes=("size=64", "size=96"))
    slow = [
        replace(m, samples={shape: tuple(4 * s for s in taken) for shape, taken in m.samples.items()})
        if m.role == "baseline"
        else m
        for m in calm
    ]
    assert slow[0].median_s() == pytest.approx(4 * calm[0].median_s())
    shapes = [next(t for t in all_tables(Climb.of(rows)) if t.name == "shapes") for rows in (calm, slow)]
    assert shapes[0].rows == shapes[1].rows
    assert interleaved_eager_s(Climb.of(slow)) == interleaved_eager_s(Climb.of(calm)) < 0.5 * slow[0].median_s()


def test_markdown_holds_the_same_tables():
    text = render_markdown(Climb.of(h200_climb()))
    for words in (
        "## The ladder",
        "## Rungs not kept, and why",
        "## The environment",
        "```toml",
        "16,780 calls",
    ):
        assert words in text


def test_no_speed_on_a_red_gate_anywhere():
    climb = cpu_climb()
    fast = tuple(s / 1234.5 for s in climb[0].samples[""])
    red = replace(climb[3], verdict="refused", samples={"": fast}, against_samples=climb[0].samples, rung="lucky")
    for text in (render_html(Climb.of([climb[0], red])), render_markdown(Climb.of([climb[0], red]))):
        assert "lucky" in text
        assert "1234" not in text and "1235" not in text and "171 µs" not in text


def test_names_are_escaped_everywhere():
    evil = stripped(
        h200_climb(shapes=(EVIL, "b")),
        workload=EVIL,
        command=EVIL,
        reason=EVIL,
        unit=EVIL,
        redline=EVIL,
        run=EVIL,
        notes=(EVIL,),
        options={EVIL: EVIL},
        objective=EVIL,
        precision=EVIL,
    )
    evil = [
        replace(m, plan=f"{m.plan} + {EVIL}", rung=EVIL, proof={EVIL: EVIL}, machine={**m.machine, "name": EVIL})
        for m in evil
    ]
    evil = [replace(m, scores=tuple(replace(s, metric=EVIL) for s in m.scores)) for m in evil]
    climb = Climb.of(evil)
    page = render_html(climb)
    tags = parse(page)
    assert "script" not in tags.seen and tags.loads == []
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    text = render_markdown(climb)
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\[x\]", outside)
    assert len(re.findall(r"^# ", outside, re.MULTILINE)) == 1


def test_nan_score_is_in_the_table_but_not_drawn():
    climb = cpu_climb()
    nan = tuple(replace(s, value=math.nan, passed=False) for s in climb[6].scores)
    page = render_html(Climb.of([climb[0], climb[1], replace(climb[6], verdict="refused", scores=nan), climb[-1]]))
    assert "NaN" in page


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for m in cpu_climb() + h200_climb():
        append(tmp_path / "climb.jsonl", m)
    return tmp_path / "climb.jsonl"


def test_docstring_examples(file):
    results = doctest.testmod(redline.ladder.report)
    assert results.attempted and not results.failed
    assert {path.suffix for path in file.parent.iterdir()} == {".jsonl", ".html", ".svg"}


def test_report_of_a_file(file, tmp_path):
    climb = redline.report(file, tmp_path / "out" / "r.html", markdown=tmp_path / "r.md")
    assert climb.subject.workload == "unet-880m"
    assert (tmp_path / "out" / "r.html").read_text(encoding="utf-8") == render_html(Climb.of(h200_climb()))
    assert "unet" in (tmp_path / "r.md").read_text(encoding="utf-8")
    assert len(json.dumps(render_html(climb))) < 400_000
