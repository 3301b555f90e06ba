"""The examples run, as they are."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from redline.errors import WorkloadError
from redline.ladder.gate import all_finite, tensors_of
from redline.ladder.metrics import relative_error
from redline.ladder.workload import call
from redline.ladder.workloads.addresses import load_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKLOADS = {
    "own_model.py:mine": {"batch": 3},
    "transformers_model.py:llama": {"length": 16, "width": 128, "layers": 2, "vocabulary": 100},
    "transformers_model.py:bert": {"length": 16, "width": 128, "layers": 2, "vocabulary": 100},
}


def test_every_example_is_tested() -> None:
    tested = {address.partition(":")[0] for address in WORKLOADS}
    assert {p.name for p in EXAMPLES.glob("*.py")} == tested | {
        "timm_model.py",
        "apply_plan.py",
        "training.py",
    }


def test_own_model_is_short() -> None:
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 16


@pytest.mark.parametrize("address", WORKLOADS)
def test_workload_examples(address: str) -> None:
    workload = load_workload(str(EXAMPLES / address), WORKLOADS[address])
    model = workload.fresh_model("cpu")
    with torch.no_grad():
        outputs = [tensors_of(call(model, workload.fresh_inputs(seed, "cpu"))) for seed in (0, 0, 1)]
    assert outputs[0] and all_finite(outputs)
    assert relative_error(outputs[0], outputs[1]) == 0
    assert relative_error(outputs[0], outputs[2]) > 0.1
    for gate in workload.gates:
        assert gate.judge(outputs[0], outputs[1]).passed
        assert not gate.judge(outputs[0], outputs[2]).passed


def test_apply_plan(capsys: pytest.CaptureFixture[str]) -> None:
    seen = runpy.run_path(str(EXAMPLES / "apply_plan.py"))
    assert "fold_batchnorm + channels_last" in capsys.readouterr().out
    assert 0 < seen["difference"] < 1e-5 * seen["output"].abs().max()


def test_training(capsys: pytest.CaptureFixture[str]) -> None:
    losses = runpy.run_path(str(EXAMPLES / "training.py"))["losses"]
    assert "fused_optimizer" in capsys.readouterr().out
    assert losses[-1] < 0.2 * losses[0]


def test_timm_missing_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    workload = load_workload(str(EXAMPLES / "timm_model.py:resnet50"), {"batch": 2})
    assert workload.fresh_inputs(0, "cpu").shape == (2, 3, 224, 224)
    with pytest.raises(WorkloadError, match=r"timm is not installed \(pip install timm\)"):
        workload.fresh_model("cpu")


def test_timm_builds() -> None:
    pytest.importorskip("timm")
    model = load_workload(str(EXAMPLES / "timm_model.py:named"), {"name": "resnet18"}).fresh_model("cpu")
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert norms and all(norm.weight.any() for norm in norms)
