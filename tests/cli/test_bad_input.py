"""Bad input: one sentence on stderr, nothing on stdout, exit code 2, no traceback, no files."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import TINY, Seen

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def assert_one_sentence(seen: Seen, words: str) -> None:
    """Progress may come before it; the last line is the sentence."""
    assert seen.code == 2, seen.err
    assert seen.out == "" and "Traceback" not in seen.err
    assert seen.err.count("redline: ") == 1
    sentence = seen.err.splitlines()[-1]
    assert sentence.startswith("redline: ") and sentence.endswith(".") and not sentence.endswith("..")
    assert words in sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["climb", "resnet", "--rungs", "warp"], "unknown rung 'warp': choose from"),
        (["climb", "resnet", "--without", "warp"], "unknown rung 'warp'"),
        (["climb", "resnet", "--rungs", "warp", "--rungs", "bf16"], "unknown rung 'warp'"),
        (["climb", "resnet", "--rungs", "compile(speed=9)"], "compile has no option 'speed'"),
        (["climb", "resnet", "--rungs", "compile(mode=warp)"], "unknown mode 'warp' (supported: default"),
        (["climb", "resnet", "--rungs", "compile(fullgraph=maybe)"], "fullgraph must be true or false"),
        (["climb", "resnet", "--rungs", "compile(mode"], "cannot parse the rung"),
        (["climb", "resnet", "--objective", "beauty"], "unknown objective 'beauty'"),
        (["climb", "resnet", "--reference", "fp8"], "unknown reference precision 'fp8'"),
        (["climb", "resnet", "--budget", "soon"], "'soon' is not a duration"),
        (["climb", "resnet", "--timeout", "0s"], "'0s' is not a duration above zero"),
        (["climb", "resnet", "--sampling", "-3s"], "'-3s' is not a duration"),
        (["climb", "resnet", "--target", "fast"], "write a time (16ms) or a size (8GiB)"),
        (["climb", "resnet", "--shapes", "batch"], "'batch' is not a shape"),
        (["climb", "resnet", "--shapes", "batch=8,,"], "is not a shape"),
        (["climb", "no such workload"], "no workload 'no such workload'"),
        (["batch-size", f"{TINY}:perceptron", "--memory", "lots"], "'lots' is not a size"),
        (["batch-size", f"{TINY}:nothing"], "takes no option 'batch'"),
        (["verify", "bf16 + bf16", "resnet"], "the plan lists 'bf16' twice"),
        (["verify", "absent.toml", "resnet"], "cannot read the plan 'absent.toml'"),
        (["verify", "warp" * 100, "resnet"], "unknown rung"),
        (["report", "absent.jsonl"], "cannot read the measurement file 'absent.jsonl'"),
        (["bench", "resnet", "--compare", "absent.json"], "cannot read the benchmark 'absent.json'"),
        (["bench", "resnet", "--plan", "warp"], "unknown rung 'warp'"),
        (["bench", "resnet", "--objective", "beauty"], "unknown objective 'beauty'"),
        (["profile", "no_such.py:f", "--device", "cpu"], "there is no file 'no_such.py'"),
        (["rungs", "warp"], "unknown rung 'warp'"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, list) else "",
)
def test_invalid_arguments(arguments: list[str], words: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    assert_one_sentence(command(*arguments), words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("absent_folder/no_such.py:f", "there is no file 'absent_folder/no_such.py'"),
        ("no.such.module:f", "cannot import 'no.such.module': ModuleNotFoundError"),
        (f"{TINY}:absent", "has no function 'absent'"),
        (f"{TINY}:nothing", "returned NoneType; return redline.Workload"),
        (f"{TINY}:raises", "the untouched model failed: ValueError: this model is broken"),
        (f"{TINY}:build_raises", "build() raised RuntimeError: no weights here"),
        (f"{TINY}:wrong_device", "holds a tensor on meta while the model runs on cpu"),
        (f"{TINY}:deaf", "does not react to the input"),
        (f"{TINY}:nan", "gives NaN or infinity"),
    ],
)
def test_a_workload_that_cannot_run(workload: str, words: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    assert_one_sentence(command("climb", workload, "--device", "cpu", "--json"), words)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_does_not_import(command: Callable[..., Seen], tmp_path: Path) -> None:
    for name, text, words in (
        ("needs", "import nothing_there\n", "ModuleNotFoundError: No module named 'nothing_there'"),
        ("typo", "def f(:\n", "SyntaxError: invalid syntax"),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        assert_one_sentence(command("bench", f"{file}:f", "--device", "cpu", "--save", "out.json"), words)
        assert not (tmp_path / "out.json").exists()


def test_a_shape_that_the_workload_does_not_know(command: Callable[..., Seen], tmp_path: Path) -> None:
    seen = command("climb", f"{TINY}:perceptron", "--device", "cpu", "--shapes", "colour=3")
    assert_one_sentence(seen, "takes no option 'colour' (it takes: batch)")
    assert list(tmp_path.iterdir()) == []


@NO_GPU
@pytest.mark.parametrize("name", ["climb", "bench", "profile", "doctor"])
def test_a_gpu_that_is_not_there(name: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    seen = command(name, *([] if name == "doctor" else ["resnet"]), "--device", "cuda")
    assert_one_sentence(seen, "torch finds no CUDA GPU")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 1\n[[rung]\n", "is not a readable plan: it is not TOML"),
        ("schema = " + "9" * 5000 + "\n", "it holds a number with too many digits"),
        ("schema = 1\nx = " + "[" * 5000, "it is nested too deeply"),
        ("schema = true\n", "it has no integer `schema`"),
        ("schema = -3\n", "it has no integer `schema`"),
        ("schema = 99\n", "has schema 99, but this Redline reads up to"),
        ('schema = 1\n[[rung]]\nmode = "default"\n', "a [[rung]] has no name"),
        ('schema = 1\n[[rung]]\nname = "warp"\n', "unknown rung 'warp'"),
        ('schema = 1\n[[rung]]\nname = "compile"\nspeed = 9\n', "compile has no option 'speed'"),
        ('schema = 1\n[[rung]]\nname = "compile"\nfullgraph = "very"\n', "fullgraph must be true or false"),
        ('schema = 1\n[[rung]]\nname = "compile"\n[[rung]]\nname = "bf16"\n', "wrong order"),
    ],
)
def test_a_broken_plan_file(text: str, words: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    assert_one_sentence(command("verify", "plan.toml", "resnet"), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 99}\n', "line 1, has schema 99, but this Redline reads up to 1"),
        ('{"schema": 1\n', "line 1, cannot be read: it is not JSON"),
        ('{"schema": 1, "options": ' + "[" * 200_000 + "\n", "line 1, cannot be read: it is nested too deeply"),
        ('{"schema": 1, "machine": 5}\n', "line 1, is damaged: 'machine' is 5, not an object"),
        ('{"schema": 1, "created": 1e300}\n', "line 1, is damaged: 'created' is 1e+300, not seconds since 1970"),
        ('{"schema": 1}\n', "is damaged"),
        ("[1]\n", "is not a measurement"),
        ("", "has no measurements"),
    ],
)
def test_a_broken_measurement_file(text: str, words: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "climb.jsonl").write_text(text)
    assert_one_sentence(command("report", "climb.jsonl", "--markdown", "out.md"), words)
    assert [path.name for path in tmp_path.iterdir()] == ["climb.jsonl"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"schema": 99, "measurements": []}, "is of schema 99"),
        ({"schema": 1, "measurements": []}, "holds no measurement"),
        ({"schema": 1, "measurements": 7}, "is damaged"),
        ({"schema": 1, "measurements": [3]}, "is damaged"),
        ([1], "is not a saved benchmark"),
    ],
)
def test_a_broken_baseline(document: object, words: str, command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "then.json").write_text(json.dumps(document))
    assert_one_sentence(command("bench", "resnet", "--compare", "then.json", "--save", "now.json"), words)
    assert not (tmp_path / "now.json").exists()


def test_a_folder_that_cannot_be_written(command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    seen = command("climb", f"{TINY}:perceptron", "--device", "cpu", "--out", "taken", "--rungs", "tf32")
    assert_one_sentence(seen, "cannot write into 'taken': 'taken' is not a folder")


@pytest.mark.parametrize(
    ("workload", "rung", "words"),
    [
        ("perceptron", "fused_optimizer", "is for training steps only, but the workload runs inference"),
        ("training", "onnxruntime", "is for inference only, but the workload runs training steps"),
    ],
)
def test_a_rung_that_was_asked_for_and_cannot_be_tried(
    workload: str, rung: str, words: str, command: Callable[..., Seen], tmp_path: Path
) -> None:
    seen = command("climb", f"{TINY}:{workload}", "--device", "cpu", "--rungs", rung)
    assert_one_sentence(seen, f"{rung} {words}: leave it out of the rungs to try")
    assert list(tmp_path.iterdir()) == []


def test_shapes_that_make_another_model(command: Callable[..., Seen], tmp_path: Path) -> None:
    seen = command("climb", f"{TINY}:of_width", "--device", "cpu", "--shapes", "width=4", "--shapes", "width=8")
    assert_one_sentence(seen, "the model of shape width=8 has different weights from that of width=4")


def test_error_in_a_real_process(tmp_path: Path) -> None:
    """The same through a real process, with a pool of its own."""
    arguments = [sys.executable, "-m", "redline", "climb", "no_such.py:f", "--device", "cpu"]
    seen = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert_one_sentence(Seen(seen.returncode, seen.stdout, seen.stderr), "there is no file 'no_such.py'")
    assert list(tmp_path.iterdir()) == []
