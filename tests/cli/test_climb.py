"""`redline climb` end to end: its files and its output; it never overwrites measurements."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from forked_python import COMMAND_LINE, ForkedPython
from patience import PATIENCE_S
from redline.cli.climb import split_rungs
from redline.ladder.measurement import load_measurements
from redline.ladder.plan import Plan

from .conftest import TINY, Seen, strict_json

ARGUMENTS = ["climb", f"{TINY}:convolutions", "--device", "cpu", "--rungs", "fold_batchnorm", "--sampling", "300ms"]
ARGUMENTS += ["--target", "1us"]  # out of reach, so that it stops nothing
WRITTEN = {"plan.toml", "measurements.jsonl", "report.html", "report.md", "front"}


@dataclass(frozen=True)
class Ended:
    folder: Path
    said: dict[str, Any]
    err: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, forked_python: ForkedPython) -> Ended:
    """One process with workers of its own, its output piped; without torch.compile, which others test."""
    place = tmp_path_factory.mktemp("climb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        seen = forked_python.run(COMMAND_LINE, *ARGUMENTS, "--out", "out", "--json", cwd=place)
    assert seen.returncode == 0, seen.stderr
    return Ended(place / "out", strict_json(seen.stdout), seen.stderr)


def test_the_files_are_written_and_named(ended: Ended) -> None:
    assert {path.name for path in ended.folder.iterdir()} == WRITTEN
    fronts = {path.name for path in (ended.folder / "front").iterdir()}
    assert {Path(path).name for path in ended.said["files"].values()} == (WRITTEN - {"front"}) | fronts
    assert {Path(point["file"]).name: point["plan"] for point in ended.said["front"]} == {
        name: str(Plan.load(ended.folder / "front" / name)) for name in fronts
    }
    assert str(Plan.load(ended.folder / "plan.toml")) == ended.said["plan"]
    assert Plan.load(ended.folder / "plan.toml").objective == "latency"
    assert "# workload: " in (ended.folder / "plan.toml").read_text()
    assert (ended.folder / "report.html").read_text().startswith("<!doctype html>")
    assert (ended.folder / "report.md").read_text().startswith("# ")


def test_the_json_is_what_was_measured(ended: Ended) -> None:
    rows = load_measurements(ended.folder / "measurements.jsonl")
    assert [row["plan"] for row in ended.said["measurements"]] == [row.plan for row in rows]
    assert (rows[-1].role, rows[-1].verdict, rows[-1].plan) == ("final", "kept", ended.said["plan"])
    assert ended.said["final"]["samples"] == {"": list(rows[-1].samples[""])}
    assert {"baseline", "compile", "trial", "final"} <= {row.role for row in rows}
    assert all(row.command.startswith("redline climb") for row in rows)


def test_missed_target_is_reported(ended: Ended) -> None:
    target = ended.said["target"]
    assert (target["asked"], target["reached"]) == ("1us", False)
    assert target["sentence"].startswith("1 µs was not reached: a step takes ")


def test_every_ratio_has_the_median_it_was_measured_against(ended: Ended) -> None:
    compared = [row for row in ended.said["rows"] if row["over_last"] is not None]
    # The eager model is compared with nothing when it wins the final race, as it may on a busy machine.
    assert {row["role"] for row in compared} >= ({"trial"} if ended.said["plan"] == "eager" else {"trial", "final"})
    turns = [
        (median(samples), median(row["against_samples"][shape]))
        for row in ended.said["measurements"]
        for shape, samples in row["samples"].items()
        if row["against_samples"]
    ]
    for row in compared:
        assert row["against"]
        # Both from the same turns; the ratio itself is of pairs of turns, which two medians only come near to.
        assert any((row["time_s"], row["against_s"]) == pytest.approx(pair, rel=1e-6) for pair in turns), row


def test_progress_goes_to_stderr_a_line_per_event(ended: Ended) -> None:
    for line in ("timing the model as it is …", "trying fold_batchnorm …", "the final race …"):
        assert line in ended.err.splitlines()
    assert "\x1b" not in ended.err and "Traceback" not in ended.err


@pytest.mark.usefixtures("without_compiler")
def test_second_climb_renames_the_measurements_and_resume_continues_them(
    ended: Ended, command: Callable[..., Seen]
) -> None:
    path = ended.folder / "measurements.jsonl"
    before = path.read_bytes()
    arguments = [*ARGUMENTS, "--out", ended.folder, "--objective", "memory", "--no-ablation"]
    second = command(*arguments)
    assert second.code == 0, second.err
    (aside,) = {path.name for path in ended.folder.iterdir()} - WRITTEN
    assert re.fullmatch(r"measurements-\d+\.jsonl", aside) and (ended.folder / aside).read_bytes() == before
    rows = load_measurements(path)
    assert {row.objective for row in rows} == {"memory"} and len({row.run for row in rows}) == 1
    table = second.out.splitlines()
    # Above the table there may be a warning about other load.
    head = next(index for index, line in enumerate(table) if line.split()[:2] == ["Rung", "Verdict"])
    assert table[head + 1].startswith("eager")
    assert any(line.startswith("plan ") for line in table)
    assert all(str(ended.folder / name) in second.out for name in WRITTEN)
    assert "target  1 µs was not reached: a step takes " in second.out and "resume  " not in second.out

    first = [row.to_json() for row in load_measurements(path) if row.role != "final"]
    resumed = command(*arguments, "--resume")
    assert resumed.code == 0 and re.search(r"^resume  resuming: \d+ earlier measurements", resumed.out, re.MULTILINE)
    after = load_measurements(path)
    # Only the final race is run again, and takes the place of the one before.
    assert [row.to_json() for row in after[: len(first)]] == first
    assert {row.role for row in after[len(first) :]} == {"final"}
    assert {path.name for path in ended.folder.iterdir()} == {*WRITTEN, aside}


@pytest.mark.usefixtures("without_compiler")
def test_the_default_folder_is_named_after_the_workload(command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TINY.read_text())
    arguments = ["--device", "cpu", "--objective", "memory", "--rungs", "tf32", "--sampling", "300ms"]
    seen = command("climb", f"{tmp_path / 'mine.py'}:perceptron", *arguments, "--resume")
    assert seen.code == 0, seen.err
    assert "there is nothing to resume: starting anew" in seen.err and "resume  there is nothing" in seen.out
    (folder,) = (tmp_path / "redline-out").iterdir()
    assert folder.name.endswith("mine-perceptron") and {path.name for path in folder.iterdir()} == WRITTEN


def test_ctrl_c_leaves_only_the_measurements(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = [sys.executable, "-m", "redline", "climb", f"{TINY}:convolutions", "--device", "cpu", "--out", "out"]
    arguments += ["--rungs", "compile", "--sampling", "300ms"]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as climb:
        assert climb.stderr is not None
        seen = ""
        for line in climb.stderr:
            seen += line
            if re.match("trying .*compile", line):
                climb.send_signal(signal.SIGINT)
                break
        rest = climb.stderr.read()
        assert climb.wait(PATIENCE_S) == 130, seen + rest
    assert "redline: interrupted." in rest and "Traceback" not in rest
    assert list(scratch.glob("redline-*")) == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["measurements.jsonl"]  # and no lock
    roles = [row.role for row in load_measurements(tmp_path / "out" / "measurements.jsonl")]
    assert roles[0] == "baseline" and "compile" not in roles and "final" not in roles


def test_lists_of_rungs() -> None:
    assert split_rungs("bf16, compile(mode=default, fullgraph=true)") == (
        "bf16",
        "compile(mode=default, fullgraph=true)",
    )
    assert split_rungs("bf16 + compile") == ("bf16", "compile")


@pytest.mark.parametrize("text", ["", ",", " , ", "bf16,", "bf16 ++ compile"])
@pytest.mark.parametrize("option", ["--rungs", "--without"])
def test_a_rung_without_a_name_is_bad_input(text: str, option: str, command: Callable[..., Seen]) -> None:
    seen = command("climb", "resnet", option, text)
    assert seen.code == 2 and seen.out == ""
    assert f"redline: {text!r} has a rung without a name: write 'bf16, compile'." in seen.err
