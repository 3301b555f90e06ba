"""Artifacts load in a new process without compiling: the bundled CNN within five seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import redline
from redline.ladder.exports.fresh_process import fresh_process

LIMIT_S = 5.0
TINY = Path(__file__).parents[2] / "tiny_workloads.py"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("plan", "out"),
    [
        ("fold_batchnorm", "resnet.onnx"),
        ("fold_batchnorm + channels_last", "resnet"),
        ("fold_batchnorm + compile", "resnet"),
        ("fold_batchnorm + compile", "resnet.pt2"),
    ],
    ids=["onnx", "folder", "compiled_folder", "aot"],
)
def test_the_bundled_network(plan: str, out: str, tmp_path: Path) -> None:
    made = redline.export(plan, "resnet", tmp_path / out, device="cpu", progress=None)
    assert redline.load_exported(made.path).manifest.load_s == made.load_s > 0.1
    measured = [made.load_s]
    batch = redline.load_workload("resnet").fresh_inputs(0, "cpu")
    while min(measured) > LIMIT_S and len(measured) < 4:  # another program may have taken the time
        with fresh_process(made.path, tmp_path, os.environ) as loaded:
            loaded(batch)
            measured.append(loaded.load_s)
    assert min(measured) <= LIMIT_S, measured


LOAD = """
import sys, torch, redline
model = redline.load_exported(sys.argv[1])
batch = torch.ones(8, 16)
before = model(batch)
assert not [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
with torch.no_grad():
    next(weight for name, weight in model.named_parameters() if name.endswith("second.bias")).add_(1)
assert torch.allclose(model(batch), before + 1, atol=1e-4)
"""


@pytest.mark.slow
def test_a_compiled_folder_loads_without_the_compiler_and_shares_its_weights(tmp_path: Path) -> None:
    made = redline.export("compile", f"{TINY}:perceptron", tmp_path / "model", device="cpu", progress=None)
    seen = subprocess.run([sys.executable, "-c", LOAD, str(made.path)], capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr


TRACE = """
import sys, torch, redline
redline.load_exported(sys.argv[1])(torch.zeros(8, 16))
from torch._dynamo.utils import counters
assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (1, 0), counters
"""


@pytest.mark.slow
def test_a_folder_that_is_traced_has_the_kernels(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"traces the model again, which takes \d+\.\d s here"):
        made = redline.export(
            "compile(dynamic=true)", f"{TINY}:perceptron", tmp_path / "model", device="cpu", progress=None
        )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}
    seen = subprocess.run(
        [sys.executable, "-c", TRACE, str(made.path)], env=environment, capture_output=True, text=True
    )
    assert seen.returncode == 0, seen.stderr
    assert len(list((tmp_path / "empty").rglob("*.so"))) == len(list((made.path / "cache").rglob("*.so"))) > 0
