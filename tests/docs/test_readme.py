"""The examples of the README run: its Python with small inputs, and the options of its commands."""

import re
import shlex
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import redline
from redline.cli import COMMANDS, load_command
from redline.ladder.measuring.worker_pool import WorkerPool
from redline.ladder.workload import Workload

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMAND_LINES = sorted(
    {
        line.partition("#")[0].strip()
        for block in re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith("redline ")
    }
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_compiler")
def test_the_three_lines_of_python(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lent_pool: WorkerPool
) -> None:
    monkeypatch.setattr(import_module("redline.ladder.search.climb"), "WorkerPool", lambda: nullcontext(lent_pool))
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(8, 16)
    known: dict[str, Any] = {"model": model, "batch": batch}
    assert 'budget="5m"' in PYTHON[0]
    exec(PYTHON[0].replace('budget="5m"', 'budget="1s"'), known)
    torch.testing.assert_close(known["output"], model(batch), rtol=0.05, atol=0.05)
    assert str(known["fast"].plan) in capsys.readouterr().out


def test_the_workload_of_the_readme() -> None:
    known: dict[str, Any] = {}
    exec(PYTHON[1], known)
    workload = known["encoder"]()
    assert isinstance(workload, Workload)
    model, batch = workload.fresh_model("cpu"), workload.fresh_inputs(0, "cpu")
    assert torch.as_tensor(workload.step(model, batch)).shape == (8, 128, 256)


def test_no_other_python_is_left_untested() -> None:
    assert len(PYTHON) == 2 and redline.__version__


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_and_their_options_exist(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    assert name in COMMANDS
    command: Any = load_command(name)
    if hasattr(command, "commands"):
        kind = arguments.pop(0) if arguments[0] in command.commands else "text"
        command = command.commands[kind]
    known = {option for parameter in command.params for option in parameter.opts}
    assert not [word for word in arguments if word.startswith("-") and word not in known]
    given = command.make_context(name, arguments, resilient_parsing=True).params
    assert not [one.name for one in command.params if one.required and given.get(one.name) in (None, (), [])]


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)[^)]*\)", README))
def test_links_and_images_exist(target: str) -> None:
    assert target.startswith("http") or (ROOT / target).exists()
