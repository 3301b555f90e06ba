"""`redline report`: writes, says where, and needs one sentence for what is wrong."""

import json

import pytest
import typer
from typer.testing import CliRunner

from ladder.report.synthetic_climb import cpu_climb, h200_climb
from redline.cli.report import report
from redline.errors import MeasurementError
from redline.ladder.measurement import append

app = typer.Typer()
app.command()(report)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "climb.jsonl"
    for m in cpu_climb(run="first") + h200_climb(run="second"):
        append(path, m)
    return path


def test_writes_beside_the_file_and_says_where(file):
    seen = CliRunner().invoke(app, [str(file)])
    assert seen.exit_code == 0, seen.output
    assert "4.94× faster than eager" in seen.output
    assert f"wrote {file.with_suffix('.html')}" in seen.output.replace("\n", "")
    assert "unet-880m" in file.with_suffix(".html").read_text(encoding="utf-8")


def test_options(file, tmp_path):
    page, text, image = tmp_path / "a.html", tmp_path / "a.md", tmp_path / "a.svg"
    options = ["-o", str(page), "--markdown", str(text), "--svg", str(image), "--run", "first", "--json"]
    seen = CliRunner().invoke(app, [str(file), *options])
    assert seen.exit_code == 0, seen.output
    said = json.loads(seen.output, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (said["html"], said["markdown"], said["run"]) == (str(page), str(text), "first")
    assert len(said["rows"]) == len(cpu_climb())
    assert said["rows"][-1]["over_last"]["middle"] > 2
    assert page.exists() and image.read_text(encoding="utf-8").startswith("<svg xmlns=")
    assert text.read_text(encoding="utf-8").startswith("# cnn on Neoverse-N1")


def test_bad_input_is_one_sentence(file, tmp_path):
    for arguments, words in (
        ([str(tmp_path / "none.jsonl")], "cannot read the measurement file"),
        ([str(file), "--run", "third"], "no run in this file starts with 'third'"),
    ):
        seen = CliRunner().invoke(app, arguments)
        assert isinstance(seen.exception, MeasurementError)
        assert words in str(seen.exception)


def test_help_has_an_example():
    seen = CliRunner().invoke(app, ["--help"])
    assert seen.exit_code == 0
    assert "redline report climb.jsonl" in " ".join(seen.output.split())
