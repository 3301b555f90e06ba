import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from redline.cli.profile import profile
from redline.errors import RedlineError

WORKLOADS = Path(__file__).with_name("profile_workloads.py")
app = typer.Typer()
app.command()(profile)


def run(name: str, *options: str):
    return CliRunner().invoke(app, [f"{WORKLOADS}:{name}", "--device", "cpu", "--repeats", "1", *options])


def test_layers_and_memory_by_default():
    seen = run("convolutional")
    assert seen.exit_code == 0, seen.exception
    for text in ("Time by layer", "Time by type", "Memory in total", "Conv2d", "without hooks"):
        assert text in seen.stdout
    assert "Attention" not in seen.stdout


def test_json_is_the_only_thing_on_stdout():
    seen = run("fused", "--attention", "--json", "--shape", "batch=3", "--shape", "length=8,width=16")
    data = json.loads(seen.stdout)
    assert data["options"] == {"batch": 3, "length": 8, "width": 16}
    assert data["attention"]["kernels"] == ["SDPA flash (CPU)"]
    assert data["layers"] is None and data["memory"] is None


def test_files_are_written(tmp_path):
    page, trace = tmp_path / "a" / "page.html", tmp_path / "trace.json.gz"
    seen = run("perceptron", "--layers", "--page", str(page), "--trace", str(trace), "--top", "2")
    assert seen.exit_code == 0, seen.exception
    assert page.read_text().startswith("<!doctype html>") and trace.stat().st_size > 100


def test_a_plan_in_one_line_and_in_a_file(tmp_path):
    seen = run("convolutional", "--plan", "channels_last", "--memory", "--json")
    assert json.loads(seen.stdout)["plan"] == "channels_last"
    path = tmp_path / "plan.toml"
    path.write_text('schema = 1\n[[rung]]\nname = "channels_last"\n')
    seen = run("convolutional", "--plan", str(path), "--memory", "--json")
    assert json.loads(seen.stdout)["plan"] == "channels_last"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nothing",), "has no function 'nothing'"),
        (("perceptron", "--nvtx"), "need a CUDA device"),
        (("perceptron", "--device", "tpu"), "unknown device 'tpu'"),
        (("perceptron", "--shape", "batch"), "is not a shape"),
        (("perceptron", "--shape", "batch=2"), "takes no option 'batch'"),
        (("perceptron", "--plan", "warp"), "unknown rung 'warp'"),
        (("perceptron", "--plan", "missing.toml"), "missing.toml"),
        (("broken",), "out of luck"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    seen = run(*arguments)
    assert isinstance(seen.exception, RedlineError)
    assert sentence in str(seen.exception) and "\n" not in str(seen.exception)


def test_help_has_an_example():
    seen = CliRunner().invoke(app, ["--help"])
    assert "Example: redline profile" in seen.stdout
