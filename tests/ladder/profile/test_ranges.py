import shlex

import pytest

from redline.ladder.plan import Plan
from redline.ladder.profile.ranges import commands, run_with_nvtx


def test_commands_repeat_the_profile():
    plan = Plan.parse("bf16 + channels_last")
    deeper = commands("my model.py:net", {"batch": 8}, plan, "cuda:0", ["", "(optimizer)", "layer4.0.conv1"])
    own = ["redline", "profile", "my model.py:net", "--nvtx", "--device", "cuda:0"]
    own += ["--shape", "batch=8", "--plan", "bf16 + channels_last"]
    nsys, ncu = shlex.split(deeper.nsys), shlex.split(deeper.ncu)
    assert nsys[:2] == ["nsys", "profile"] and nsys[-len(own) :] == own
    assert ncu[0] == "ncu" and ncu[-len(own) :] == own
    assert nsys[nsys.index("-c") + 1] == "cudaProfilerApi"
    assert ncu[ncu.index("--nvtx-include") + 1] == "layer4.0.conv1/"


def test_without_layers_the_whole_step_is_named():
    deeper = commands("m:f", {}, Plan(), "cuda:0", [])
    assert "step/" in shlex.split(deeper.ncu)
    assert "--plan" not in deeper.ncu


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["written_out_training", "fused"])
def test_nvtx_ranges_are_balanced(subject, name, monkeypatch):
    import torch

    depth, pushed = [0], []
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def count_push(label: str) -> int:
        depth[0] += 1
        pushed.append(label)
        return push(label)

    def count_pop() -> int:
        depth[0] -= 1
        return pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", count_push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", count_pop)
    built = subject(name, device="cuda")
    run_with_nvtx(built)
    assert depth == [0]
    assert {"step", "model", "attention.qkv"} <= set(pushed)
    assert ("attention.qkv backward" in pushed) == built.training
