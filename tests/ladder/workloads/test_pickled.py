"""Workloads whose modules no new process can import reach the trial processes, and compile there."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from forked_python import ForkedPython
from redline.ladder.workload import Workload
from redline.ladder.workloads.addresses import load_workload
from redline.ladder.workloads.pickled import save_model, save_workload

SCALES = """
import torch

SCALE = 2.0

def squash(x):
    return torch.tanh(x) * SCALE
"""
NETWORK = """
import scales_next_to_it
import torch
from scales_next_to_it import squash
from torch import nn

WIDTH = 4

def widened(x):
    return x * WIDTH

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return widened(self.linear(x)) + squash(x) + scales_next_to_it.squash(x)
"""
# Compiles in one graph with the model that the address builds, in a process that has loaded nothing else.
COMPILE = """
import sys, torch
sys.path.remove("")
from redline.ladder.workloads.addresses import load_workload
workload = load_workload(sys.argv[1])
model, batch = workload.fresh_model("cpu"), torch.ones(2, 4)
torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(batch), model(batch))
assert model.__class__.__module__ == sys.argv[2], model.__class__.__module__
"""


def load_by_path(path: Path, name: str, registered: bool) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiler() -> Iterator[ForkedPython]:
    with ForkedPython("torch._dynamo") as forked:
        yield forked


def compiles_elsewhere(compiler: ForkedPython, workload: Workload, folder: Path, module: str) -> None:
    (folder / "saved").mkdir()
    seen = compiler.run(COMPILE, save_workload(workload, folder / "saved"), module)
    assert seen.returncode == 0, seen.stderr[-2000:]


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: bool) -> ModuleType:
    """A module that was loaded by path, and that imports another one from its folder, which has left `sys.path`."""
    (tmp_path / "scales_next_to_it.py").write_text(SCALES)
    (tmp_path / "network.py").write_text(NETWORK)
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = load_by_path(tmp_path / "network.py", "network_by_path", registered)
    for name in set(sys.modules) - before:
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    return module


@pytest.mark.parametrize("registered", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_model_from_a_file_loaded_by_path_compiles_in_a_trial(
    network: ModuleType, registered: bool, tmp_path: Path, compiler: ForkedPython
) -> None:
    workload = Workload(network.Network, lambda seed: torch.randn(2, 4))
    compiles_elsewhere(compiler, workload, tmp_path, "network_by_path")


@pytest.mark.parametrize("registered", [True])
def test_a_model_in_memory_compiles_in_a_trial(
    network: ModuleType, registered: bool, tmp_path: Path, compiler: ForkedPython
) -> None:
    workload = Workload(save_model(network.Network(), tmp_path / "model.pt"), lambda seed: torch.randn(2, 4))
    compiles_elsewhere(compiler, workload, tmp_path, "network_by_path")


def test_a_workload_loaded_by_its_address_compiles_in_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: ForkedPython
) -> None:
    (tmp_path / "scales_next_to_it.py").write_text(SCALES)
    mine = "import redline\n\ndef mine():\n    return redline.Workload(Network, lambda seed: torch.randn(2, 4))\n"
    (tmp_path / "network.py").write_text(f"{NETWORK}\n{mine}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    compiles_elsewhere(compiler, load_workload(f"{tmp_path}/network.py:mine"), tmp_path, "redline_workload_network")
