"""Tests that models are built on the meta device without large imports, and get uninitialized tensors afterwards."""

from pathlib import Path

import pytest
import torch
from torch import nn

from forked_python import ForkedPython
from redline.machine.meta import allocate, meta_device

# `redline generate` and `redline upscale` load these models, and do not compile on a CPU.
_LOADS = """
import sys
from pathlib import Path
import torch
import redline
from redline.models.decoder import Decoder, DecoderConfig, load_decoder, save_decoder
from redline.models.drct import load_drct
from redline.models.lsd import load_lsd

config = DecoderConfig(vocabulary=16, width=8, layers=1, heads=2, mlp_width=8, context=8)
save_decoder(Decoder(config), "model")
load_decoder("model", torch.bfloat16)
weights = Path(redline.__file__).parent / "models"
load_drct(next((weights / "drct").rglob("*.safetensors")))
load_lsd(next((weights / "lsd").rglob("*.safetensors")))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_models_are_loaded_without_the_compiler(tmp_path: Path, forked_python: ForkedPython) -> None:
    seen = forked_python.run(_LOADS, cwd=tmp_path)
    assert (seen.stdout, seen.returncode) == ("[]\n", 0), seen.stderr[-2000:]


def test_modules_are_built_without_memory_and_allocated_in_a_dtype() -> None:
    with meta_device():
        module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
        nn.init.normal_(module[1].weight, std=2)
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert allocate(module, "cpu", torch.bfloat16) is module
    found = {name: (str(tensor.device), tensor.dtype) for name, tensor in module.state_dict().items()}
    assert found.pop("2.num_batches_tracked") == ("cpu", torch.int64)
    assert set(found.values()) == {("cpu", torch.bfloat16)}
    assert {name: tuple(one.shape) for name, one in module.named_parameters()}["1.weight"] == (3, 4)


def test_random_initialization_works_again_afterwards() -> None:
    with meta_device(), pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    weight = torch.zeros(64)
    assert nn.init.normal_(weight).count_nonzero() > 0
