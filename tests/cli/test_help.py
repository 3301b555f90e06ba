"""Help with examples, the list of rungs, and the bundled workloads."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forked_python import COMMAND_LINE, ForkedPython
from patience import PATIENCE_S
from redline.cli import COMMANDS, load_command
from redline.ladder.rungs import RUNGS
from redline.ladder.workloads import BUNDLED
from redline.models.samplers import SAMPLERS
from redline.stream.choices import SAMPLER_NAMES
from redline.upscale.choices import UPSCALE_PRESETS
from redline.upscale.settings import PRESETS

from .conftest import Seen

LARGE = (
    "torch",
    "numpy",
    "av",
    "pyvips",
    "PIL",
    "transformers",
    "tokenizers",
    "safetensors",
    "onnx",
    "jinja2",
    "aiohttp",
)


def plain(text: str) -> str:
    """Without colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def test_python_m_redline_lists_every_command(tmp_path: Path) -> None:
    seen = subprocess.run([sys.executable, "-m", "redline", "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert (seen.returncode, seen.stderr) == (0, "")
    assert all(re.search(rf"\b{name}\b", seen.stdout) for name in COMMANDS)


@pytest.fixture
def broken_pipe() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def test_broken_pipe_has_its_own_exit_code(broken_pipe: int) -> None:
    command = [sys.executable, "-m", "redline", "--help"]
    seen = subprocess.run(command, stdout=broken_pipe, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert (seen.returncode, seen.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [("rungs",), ("rungs", "--json")], ids=" ".join)
def test_broken_pipe_after_torch_was_imported(
    arguments: tuple[str, ...], broken_pipe: int, forked_python: ForkedPython
) -> None:
    seen = forked_python.run(COMMAND_LINE, *arguments, stdout=broken_pipe)
    assert (seen.returncode, seen.stderr) == (141, "")


def test_command_list_matches_the_help_of_each_command() -> None:
    for name, said in COMMANDS.items():
        assert load_command(name).help.split("\n\n")[0].replace("\n", " ") == said


def test_the_version(command: Callable[..., Seen]) -> None:
    from redline.machine.version import VERSION

    seen = command("--version")
    assert (seen.code, seen.out) == (0, f"{VERSION}\n")


def test_no_help_imports_torch_or_another_large_package(tmp_path: Path) -> None:
    code = f"""
import sys
from redline.cli import COMMANDS, app, load_command

def show(*words):
    try:
        app([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
    loaded = [name for name in {LARGE!r} if name in sys.modules]
    assert not loaded, (words, loaded)

show()
show("bench", "serve")
for name in COMMANDS:
    show(name)
    for part in getattr(load_command(name), "commands", ()):
        show(name, part)
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (seen.returncode, seen.stderr) == (0, "") and "redline train drct" in seen.stdout


def test_help_names_every_choice() -> None:
    assert tuple(SAMPLERS) == SAMPLER_NAMES
    assert tuple(PRESETS) == UPSCALE_PRESETS


def test_every_command_has_an_example_that_begins_with_its_name(command: Callable[..., Seen]) -> None:
    for name in COMMANDS:
        # A group (redline train drct) has its examples where its options are.
        parts = [[name, part] for part in getattr(load_command(name), "commands", {})] or [[name]]
        parts += [["bench", "serve"]] if name == "bench" else []
        for words in parts:
            seen = command(*words, "--help")
            assert seen.code == 0
            assert re.search(rf"Examples?: redline {' '.join(words)}\b", plain(seen.out)), words
            assert plain(command(*words, "-h").out) == plain(seen.out)


def test_an_unknown_command_and_an_unknown_option_are_bad_input(command: Callable[..., Seen]) -> None:
    for arguments in (["fly"], ["climb"], ["climb", "resnet", "--warp"], ["bench", "--any-machine=maybe"]):
        seen = command(*arguments)
        assert seen.code == 2 and seen.out == "" and "Traceback" not in seen.err


def test_rungs_lists_all_of_them_in_order(command: Callable[..., Seen]) -> None:
    seen = command("rungs")
    assert [line.split()[0] for line in seen.out.splitlines()[1:]] == list(RUNGS)
    assert [row["name"] for row in command("rungs", "--json").json()] == list(RUNGS)


def test_one_rung_shows_its_options(command: Callable[..., Seen]) -> None:
    text = command("rungs", "compile").out
    (row,) = command("rungs", "compile", "--json").json()
    for option in row["options"]:
        assert option["name"] in text and option["help"]
    assert {"mode", "fullgraph", "dynamic"} <= {option["name"] for option in row["options"]}


@pytest.mark.parametrize("name", list(RUNGS))
def test_every_rung_can_be_shown(name: str, command: Callable[..., Seen]) -> None:
    seen = command("rungs", name)
    assert seen.code == 0 and seen.out.startswith(name) and RUNGS[name].summary[:40] in plain(seen.out)


def test_bundled_workloads(command: Callable[..., Seen]) -> None:
    text = command("rungs", "--workloads").out
    rows = command("rungs", "--workloads", "--json").json()
    assert [row["name"] for row in rows] == list(BUNDLED)
    for row in rows:
        assert row["summary"] and row["name"] in text


def test_doctor_says_what_the_machine_can_do(command: Callable[..., Seen]) -> None:
    seen = command("doctor", "--device", "cpu", "--json")
    machine = seen.json()
    assert seen.code == 0 and machine["device"] == "cpu"
    assert machine["ceilings"]["bytes_per_s"] > 1e8 and machine["ceilings"]["matmul_flops_per_s"]["fp32"] > 1e8
    assert machine["recommended_precision"]["precision"] in ("fp32", "fp16", "bf16")
    assert list(machine["rungs"]) == list(RUNGS)
    for name, rung in machine["rungs"].items():
        assert rung["available"] == (rung["why_not"] == ""), name
        assert rung["available"] or len(rung["why_not"].split()) >= 3, name
    assert not machine["rungs"]["cuda_graph"]["available"] and machine["rungs"]["fold_batchnorm"]["available"]
    text = command("doctor", "--device", "cpu").out
    assert machine["name"] in text and "copy" in text and machine["rungs"]["cuda_graph"]["why_not"] in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_full_disk_is_reported(forked_python: ForkedPython) -> None:
    said = "redline: the output cannot be written: No space left on device."
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "redline", "--version"]
        seen = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (seen.returncode, seen.stderr.strip()) == (2, said)
        seen = forked_python.run(COMMAND_LINE, "rungs", stdout=full)
        assert (seen.returncode, seen.stderr.strip()) == (2, said)
