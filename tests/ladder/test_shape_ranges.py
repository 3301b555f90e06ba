"""Ranges of input shapes: the sizes of a range, the sentence about them, and what a plan does at each of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.cli.options import parse_shapes, parse_workload_options
from redline.errors import RedlineError
from redline.ladder.job import Job
from redline.ladder.measurement import Measurement, load_measurements
from redline.ladder.measuring import new_size
from redline.ladder.plan import Plan
from redline.ladder.report.climb import Climb
from redline.ladder.report.tables import all_tables
from redline.ladder.rung import ShapeCounts
from redline.ladder.rungs import compile as compile_rung
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.ladder.search.climb import climb
from redline.ladder.shape_ranges import (
    FAILS,
    FALLS_BACK,
    READY,
    SETS_UP,
    SizeResult,
    describe_range,
    read_ranges,
    read_shapes,
)
from redline.ladder.verify import verify
from redline.ladder.workload import Workload
from redline.machine.cuda_graphs import CaptureCounts
from redline.machine.machine import Machine

PLANTED = str(Path(__file__).parents[1] / "planted_rungs.py")


def test_a_range_is_timed_at_three_sizes_and_tried_at_all() -> None:
    shapes = parse_shapes(["batch=1..32,size=64"])
    assert list(read_shapes(shapes)) == ["batch=1,size=64", "batch=11,size=64", "batch=32,size=64"]
    (one,) = read_ranges(shapes)
    assert one.label == "batch=1..32,size=64" and one.count == 32
    assert [shape["batch"] for shape in one.every().values()] == list(range(1, 33))
    (long,) = read_ranges([{"length": range(16, 4097, 16)}])
    lengths = [shape["length"] for shape in long.every().values()]
    assert long.label == "length=16..4096:16" and long.count == 256
    assert len(lengths) == 33 and lengths[0] == 16 and lengths[-1] == 4096 and all(n % 16 == 0 for n in lengths)


def test_ranges_grow_together_and_stand_beside_shapes() -> None:
    shapes = parse_shapes(["batch=1..4,length=16..64:16", "batch=9"])
    timed = [(shape["batch"], shape.get("length")) for shape in read_shapes(shapes).values()]
    assert timed == [(1, 16), (2, 32), (4, 64), (9, None)]
    assert [one.label for one in read_ranges(shapes)] == ["batch=1..4,length=16..64:16"]
    assert list(read_shapes([{"batch": range(5, 6)}])) == ["batch=5"]


@pytest.mark.parametrize("text", ["batch=5..2", "batch=1..", "batch=..8", "batch=1..8:0"])
def test_wrong_ranges(text: str) -> None:
    with pytest.raises(RedlineError, match="is not a range: write low"):
        parse_shapes([text])


def test_a_range_where_one_value_is_needed() -> None:
    with pytest.raises(RedlineError, match="'batch' needs one value"):
        parse_workload_options(["batch=1..8"])
    with pytest.raises(RedlineError, match="the range of 'batch' in .* is empty"):
        read_ranges([{"batch": range(3, 3)}])
    assert parse_shapes(["film=../a..b"])["film=../a..b"] == {"film": "../a..b"}


def results(*events: str) -> list[SizeResult]:
    reasons = {FALLS_BACK: "no room", FAILS: "odd"}
    return [SizeResult(f"n={i}", event, 0.5 * i, 0.1, reasons.get(event, "")) for i, event in enumerate(events, 1)]


def test_the_sentence_joins_neighbors() -> None:
    seen = results(SETS_UP, SETS_UP, READY, SETS_UP, SETS_UP, SETS_UP, FALLS_BACK, FAILS)
    assert describe_range("n=1..8", seen, 8) == (
        "n=1..8 (8 sizes): sets up again at n=1, n=2, n=4 to n=6 (500 ms to 3 s each); falls back at n=7 (no room); "
        "fails at n=8 (odd)"
    )
    assert describe_range("n=1..90", results(READY, READY), 90) == (
        "n=1..90 (90 sizes, of which 2 were tried): sets up again nowhere; falls back nowhere"
    )
    assert "sets up again at each of the 2 sizes (500 ms to 1 s each)" in describe_range(
        "n", results(*[SETS_UP] * 2), 2
    )


def test_events_follow_from_the_counts() -> None:
    before = ShapeCounts(2, 1, "full")
    assert new_size.event_between(before, ShapeCounts(2, 1, "full")) == (READY, "")
    assert new_size.event_between(before, ShapeCounts(3, 1, "full")) == (SETS_UP, "")
    assert new_size.event_between(before, ShapeCounts(3, 2, "full")) == (FALLS_BACK, "full")


OPTIONS: dict[str, Any] = {"device": "cpu", "timeout": 30, "sampling": 1, "progress": None}


@pytest.mark.usefixtures("planted", "no_ceilings", "lent_workers", "without_compiler")
def test_verify_says_what_happens_at_each_size() -> None:
    shapes = [{"batch": range(1, 9)}]
    seen = verify("planted_sizes", f"{PLANTED}:ticks", shapes=shapes, **OPTIONS)
    events = {size.shape.removeprefix("batch="): size.event for size in seen.sizes["batch=1..8"]}
    assert list(events) == [*"12345678"]
    assert [events[timed] for timed in "138"] == [SETS_UP] * 3 and events["7"] == FAILS
    assert sorted(events.values()) == [FAILS] + [FALLS_BACK] * 3 + [SETS_UP] * 4
    assert not seen.holds and seen.reason.startswith("the plan fails at batch=7: ") and "unlucky" in seen.reason
    (sentence,) = seen.ranges
    assert "falls back at" in sentence and "(planted_sizes: there are four)" in sentence


@pytest.mark.usefixtures("planted", "no_ceilings", "lent_workers", "without_compiler")
def test_the_plan_file_and_the_report_say_it(tmp_path: Path) -> None:
    shapes = parse_shapes(["batch=1..4"])
    climbed = climb(f"{PLANTED}:ticks", shapes=shapes, rungs=["planted_sizes"], out=tmp_path, **OPTIONS)
    assert str(climbed.plan) == "planted_sizes"
    (sentence,) = climbed.ranges
    assert sentence.startswith("batch=1..4 (4 sizes): sets up again at each of the 4 sizes (")
    assert f"# shapes: {sentence}" in (tmp_path / "plan.toml").read_text().splitlines()
    assert Plan.load(tmp_path / "plan.toml").rungs == climbed.plan.rungs
    found = load_measurements(tmp_path / "measurements.jsonl")
    assert found[-1].ranges == climbed.final.ranges and [m.ranges for m in found[:-1]] == [{}] * (len(found) - 1)
    assert list(found[-1].samples) == ["batch=1", "batch=2", "batch=4"]
    table = next(table for table in all_tables(Climb.of(found)) if table.name == "sizes")
    assert [row[:2] for row in table.rows] == [(f"batch={n}", SETS_UP) for n in (1, 2, 3, 4)]
    assert sentence in table.note


def test_a_damaged_size_is_named() -> None:
    row = Measurement("w", "eager", "final", "kept", "", {}, ranges={"n=1..2": tuple(results(READY, SETS_UP))})
    data = json.loads(row.to_json())
    assert Measurement.from_dict(data).ranges == row.ranges
    data["ranges"]["n=1..2"][0]["first_s"] = "soon"
    with pytest.raises(RedlineError, match="first_s"):
        Measurement.from_dict(data)


@pytest.mark.slow
def test_compiled_code_falls_back_beyond_the_limit_of_recompilations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).relu()

    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    job = Job.of(Net(), samples=(torch.randn(1, 4),))
    plan, job = Plan.parse("compile(dynamic=false)").build(job, Machine.detect("cpu"))
    run, events = job.finish(), []
    for size in (2, 3, 4, 5, 2):
        workload = Workload(Net, lambda seed, size=size: torch.randn(size, 4))
        found = new_size.try_size(workload, plan, job, run, torch.device("cpu"), lambda: None)
        events.append((found["event"], found["reason"]))
    fallback = (FALLS_BACK, "compile: torch's limit of recompilations was reached")
    assert events == [(SETS_UP, "")] * 2 + [fallback] * 2 + [(READY, "")]


def test_recorded_cuda_graphs_are_counted_with_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps them as trees: a graph, and those that were recorded after it."""

    def node(*after: object) -> SimpleNamespace:
        return SimpleNamespace(children={0: list(after)})

    manager = SimpleNamespace(roots={0: [node(node(), node(node()))], 1: [node()]})
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager if index == 3 else None)
    monkeypatch.setattr(compile_rung.importlib, "import_module", lambda name: trees)
    assert compile_rung._recorded_cuda_graphs(torch.device("cuda:3")) == 5
    assert compile_rung._recorded_cuda_graphs(torch.device("cuda:0")) == 0


def test_a_full_cuda_graph_falls_back() -> None:
    rung = CudaGraph(limit=2)
    counts = CaptureCounts(graphs=2, replays=9)
    job = Job.of(nn.Linear(2, 2)).with_evidence("cuda_graph", counts)
    assert rung.shape_counts(job) == ShapeCounts(2, 0, "")
    counts.uncaptured = 1
    assert rung.shape_counts(job) == ShapeCounts(2, 1, "only 2 graphs are captured (limit=2)")


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["compile(mode=reduce-overhead)", "cuda_graph(limit=2)"])
def test_every_size_is_captured_on_a_gpu(plan: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).relu()

    torch._dynamo.reset()
    parsed, job = Plan.parse(plan).build(
        Job.of(Net().cuda(), samples=(torch.randn(2, 4).cuda(),)), Machine.detect("cuda")
    )
    run, events = job.finish(), []
    for size in (2, 3, 4, 3):
        workload = Workload(Net, lambda seed, size=size: torch.randn(size, 4))
        found = new_size.try_size(workload, parsed, job, run, torch.device("cuda"), torch.cuda.synchronize)
        events.append(found["event"])
    last = FALLS_BACK if "limit" in plan else SETS_UP
    assert events == [SETS_UP, SETS_UP, last, READY]
