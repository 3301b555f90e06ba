"""The history file: the order of a climb learns from it, and damage never stops a climb."""

import json
from pathlib import Path

import pytest

from redline.ladder.plan import Plan, parse_rung
from redline.ladder.search.estimates import Estimates
from redline.ladder.search.history import History, Record
from redline.ladder.search.search_order import by_gain_per_second


def record(rung: str, gain: float = 1.0, setup_s: float = 1.0, finished: bool = True, digest: str = "x") -> Record:
    return Record(rung, rung, False, 100, setup_s, finished, gain, digest)


def order(history: History, digest: str = "x", seconds: float = 5.0) -> list[str]:
    rungs = [parse_rung(name) for name in ("sdpa", "channels_last", "keep_memory")]
    return [str(rung) for rung in by_gain_per_second(rungs, lambda _: seconds, history, False, digest)]


def test_the_order_is_learned_from_earlier_climbs(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    assert order(History(path)) == ["channels_last", "sdpa", "keep_memory"]
    history = History(path)
    for _ in range(6):
        history.add(record("channels_last"))
        history.add(record("keep_memory", 1.5))
    history.save()
    assert order(History(path)) == ["keep_memory", "sdpa", "channels_last"]
    # A trial of the same workload counts more than those of others.
    history.add(record("sdpa", 1.6, digest="mine"))
    assert order(history, "mine")[0] == "sdpa" and order(history, "yours")[0] == "keep_memory"


def test_a_cheap_trial_comes_before_a_dear_one() -> None:
    rungs = [parse_rung("channels_last"), parse_rung("sdpa")]
    seconds = {"channels_last": 60.0, "sdpa": 2.0}
    found = by_gain_per_second(rungs, lambda rung: seconds[rung.name], History(), False, "")
    assert [rung.name for rung in found] == ["sdpa", "channels_last"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        '{"rung": 1}',
        "[1, null, [], {}]",
        '[{"rung": "bf16", "gain": "much"}]',
        "\x00\xff",
        '[{"rung":"a","plan":"a","training":false,"operations":0,"setup_s":1,"finished":true,"gain":NaN,"digest":""}]',
    ],
)
def test_a_damaged_history_is_ignored_and_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    history = History(path)
    assert history.records == []
    history.add(record("bf16", 1.4))
    history.save()
    assert [r.rung for r in History(path).records] == ["bf16"]


def test_valid_entries_survive_beside_damaged_ones_and_other_climbs(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    one, other = History(path), History(path)
    for name, history in (("bf16", one), ("sdpa", other)):
        history.add(record(name))
        history.save()
    entries = json.loads(path.read_text())
    path.write_text(json.dumps([*entries, {"rung": 3}, "?"]))
    assert [r.rung for r in History(path).records] == ["bf16", "sdpa"]


def test_a_folder_that_cannot_be_written_does_not_stop_a_climb(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "history.json")
    history.add(record("bf16"))
    history.save()


def test_set_ups_are_estimated_from_operations_and_history() -> None:
    def estimate(plan: str, operations: int = 100, *records: Record, digest: str = "mine") -> float:
        history = History()
        history.records += records
        return Estimates(history, digest, operations, False).setup_s(Plan.parse(plan))

    assert estimate("bf16") < estimate("openvino") < estimate("onnxruntime") < estimate("compile")
    assert estimate("compile") < estimate("compile(mode=max-autotune)")
    assert estimate("compile", 1000) > 3 * estimate("compile", 100)
    slow = [record("compile", setup_s=90.0) for _ in range(8)]
    assert estimate("compile", 100, *slow) > 3 * estimate("compile", 100)
    # A set-up of the same plan of the same workload says most.
    assert estimate("compile", 100, *slow, record("compile", setup_s=10.0, digest="mine")) == pytest.approx(13)
    # One that was stopped takes longer than that.
    stopped = [record("compile", setup_s=90.0, finished=False) for _ in range(8)]
    assert estimate("compile", 100, *stopped) > estimate("compile", 100, *slow)


def test_set_ups_of_this_climb_correct_the_estimate() -> None:
    from redline.ladder.measuring.worker_pool import WorkerFailed

    estimates, plan = Estimates(History(), "x", 100, False), Plan.parse("bf16 + compile")
    assert not estimates.has_seen(plan)
    estimates.record("bf16 + compile", plan, 40.0, 1.5)
    assert estimates.setup_s(Plan.parse("compile(freeze=true)")) == pytest.approx(52)
    estimates.record("compile", Plan.parse("compile"), 1.0, 1.0, cached=True)
    assert estimates.setup_s(plan) == pytest.approx(52)
    estimates.record_failure("compile", plan, WorkerFailed("timeout", "late"), 80.0)
    assert estimates.setup_s(plan) == pytest.approx(120)
    estimates.record_failure("onnxruntime", Plan.parse("onnxruntime"), WorkerFailed("error", "broken"), 80.0)
    assert not estimates.has_seen(Plan.parse("onnxruntime"))
