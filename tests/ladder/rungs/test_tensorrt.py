"""torch-tensorrt runs on NVIDIA GPUs only: a stand-in for it exercises everything that is Redline's own."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.ladder.rungs.tensorrt import Tensorrt
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
GPU = replace(CPU, device="cuda:0", name="GPU", capability=(9, 0))


class TorchTensorRTModule(nn.Module):
    """Has the name of the real one, by which the proof finds it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]  # an engine shows no PyTorch modules inside

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.inner[0](*tensors)


class Leftover(nn.Module):
    """An engine, and behind it an operator that stayed in PyTorch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.engine = TorchTensorRTModule(inner)
        self.left = fx.symbolic_trace(_Double())

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        first, *rest = self.engine(*tensors)
        return self.left(first), *rest


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.neg(torch.neg(x))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A torch_tensorrt that notes how it is called and wraps the model as the real one would."""
    noted: list[dict[str, Any]] = []
    module = ModuleType("torch_tensorrt")
    module.__spec__ = ModuleSpec("torch_tensorrt", None)

    def compile(model: nn.Module, ir: str, arg_inputs: list[Tensor], **settings: Any) -> nn.Module:
        print("a log line that must not reach the user")
        noted.append({"ir": ir, "shapes": [tuple(t.shape) for t in arg_inputs], **settings})
        return Leftover(model)

    module.compile = compile
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    return noted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor, *, scale: Tensor, flip: bool = False) -> dict[str, Tensor]:
        y = self.linear(x) * scale
        return {"y": -y if flip else y, "x": x}


def sample(rows: int = 4) -> dict[str, Any]:
    return {"x": torch.randn(rows, 5), "scale": torch.rand(3), "flip": True}


def test_called_like_the_model_with_one_compilation_per_shape(calls: list[dict[str, Any]], capsys: Any) -> None:
    model = Net().eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rung = Tensorrt(optimization_level=5)
    job = rung.apply(Job.of(model, samples=(sample(),)))
    fast = job.finish()
    for rows in (4, 7, 4):
        inputs = sample(rows)
        seen, expected = fast(**inputs), model(**inputs)
        assert list(seen) == ["y", "x"]
        torch.testing.assert_close(seen["y"], expected["y"])
        torch.testing.assert_close(seen["x"], expected["x"])
    assert calls == [
        {"ir": "dynamo", "shapes": [(3,), (4, 5)], "optimization_level": 5},
        {"ir": "dynamo", "shapes": [(3,), (7, 5)], "optimization_level": 5},
    ]
    assert rung.proof(job) == "2 TensorRT engines for 2 input shapes; 4 operators run in PyTorch"
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert capsys.readouterr().out == ""


def test_fp16_option_reaches_the_compiler(calls: list[dict[str, Any]]) -> None:
    job = Tensorrt(precision="fp16").apply(Job.of(Net(), samples=(sample(),)))
    assert calls[0]["enable_autocast"] is True
    assert calls[0]["autocast_low_precision_type"] is torch.float16
    assert job.precision == "fp16"


def test_proof_is_empty_without_an_engine(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch_tensorrt"], "compile", lambda model, **_: fx.symbolic_trace(_Double()))
    rung = Tensorrt()
    job = rung.apply(Job.of(nn.ReLU(), samples=(torch.randn(3),)))
    assert rung.proof(job) == ""


def test_failed_compilation_raises_rung_error(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: nn.Module, **_: Any) -> nn.Module:
        raise RuntimeError("no converter for aten.strange.\nand a long trace")

    monkeypatch.setattr(sys.modules["torch_tensorrt"], "compile", fail)
    with pytest.raises(RungError, match="RuntimeError: no converter for aten.strange.$") as error:
        Tensorrt().apply(Job.of(nn.ReLU(), samples=(torch.randn(3),)))
    assert "\n" not in str(error.value)


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs an NVIDIA GPU" in Tensorrt().why_not(CPU)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    assert Tensorrt().why_not(GPU) == 'torch-tensorrt is not installed: pip install "redline[tensorrt]"'


def test_why_not_with_a_job(calls: list[dict[str, Any]]) -> None:
    job = Job.of(nn.ReLU(), samples=(torch.randn(3),))
    assert Tensorrt().why_not(GPU, job) == ""
    assert "needs sample inputs" in Tensorrt().why_not(GPU, Job.of(nn.ReLU()))
    assert "already bf16" in Tensorrt(precision="fp16").why_not(GPU, replace(job, precision="bf16"))
    with pytest.raises(RungError, match="needs sample inputs"):
        Tensorrt().apply(Job.of(nn.ReLU()))


def test_round_trip() -> None:
    plan = Plan((Tensorrt(precision="fp16", optimization_level=5),))
    assert Plan.parse(str(plan)) == plan


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    pytest.importorskip("torch_tensorrt")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).cuda().eval()
    x = torch.randn(2, 3, 9, 9, device="cuda")
    model(x)
    rung = Tensorrt()
    fast = Plan((rung,)).apply(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    assert "TensorRT engine" in rung.proof(fast.job)
