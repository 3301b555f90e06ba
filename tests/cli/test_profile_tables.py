"""The tables of a profile in the terminal, against a golden file."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from goldens import check_golden
from redline.cli import profile as command
from redline.ladder.profile.attention import Attention, AttentionLayer
from redline.ladder.profile.kernels import KernelTime
from redline.ladder.profile.layers import LayerTime, LayerTimes
from redline.ladder.profile.memory import LayerMemory, Memory
from redline.ladder.profile.ranges import Deeper
from redline.ladder.profile.result import Profile

LAYERS = LayerTimes(
    (
        LayerTime("", "Model", 1, 0.001, 0.02, 0.002, 0.03, 0.0),
        LayerTime("first", "Linear", 2, 0.005, 0.005, 0.01, 0.01, 4e9),
        LayerTime("second", "Linear", 2, 0.004, 0.004, 0.008, 0.008, 2e9),
        LayerTime("optimizer", "optimizer", 1, 0.003, 0.003, 0.0, 0.0, 0.0),
    ),
    0.033,
    0.036,
    5,
    6e9,
    "fp32",
    1e12,
)
MEMORY = Memory(
    (
        LayerMemory("first", "Linear", 4000, 2000, 4000, 8000, 5000),
        LayerMemory("second", "Linear", 1000, 0, 1000, 2000, 900),
    ),
    "kept for the backward pass",
    5000, 2000, 5000, 10000, 64, 9000, {"weights": 5000, "activations": 4000, "inputs": 0},
    None, None, None, None, 2**20, 2**21,
)  # fmt: skip
ATTENTION = Attention(
    (AttentionLayer("first", "Attention", "flash", 2, 0.004, 0.001),), ("flash",), 0.25, 0.1, "by layers"
)
KERNELS = (KernelTime("aten::mm", 2.0, 0.004, 0.8), KernelTime("aten::add_[x]", 1.5, 0.001, 0.2))


def printed(seen: Profile, top: int, monkeypatch: pytest.MonkeyPatch) -> str:
    page = io.StringIO()
    monkeypatch.setattr(command, "results", Console(file=page, width=120))
    command.print_profile(seen, top)
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def test_every_cell_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Profile(
        "a workload", {}, "bf16", "cuda:0", "a GPU", "2.0", True, 0.033, ("a [note]",), LAYERS, MEMORY, ATTENTION,
        KERNELS, "", Deeper("nsys a", "ncu b"),
    )  # fmt: skip
    inference = replace(
        training,
        training=False,
        device="cpu",
        notes=(),
        deeper=None,
        layers=replace(LAYERS, ceiling_flops_per_s=0.0),
        memory=replace(MEMORY, layers=tuple(replace(m, gradient_bytes=0, optimizer_bytes=0) for m in MEMORY.layers)),
        attention=replace(ATTENTION, layers=(), core_share=None),
    )
    bare = replace(inference, layers=None, memory=None, kernels=(), attention=Attention((), (), 0.0, None, "nothing"))
    text = printed(training, 2, monkeypatch) + printed(inference, 9, monkeypatch) + printed(bare, 9, monkeypatch)
    check_golden("profile_tables.txt", text)
