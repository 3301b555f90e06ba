"""openvino: the same outputs as the model, in the structure of the model, with a proof that OpenVINO computes them."""

import importlib.util
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rungs.openvino import Openvino
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
GPU = replace(CPU, device="cuda:0", name="GPU", capability=(9, 0))
# The extra installs OpenVINO on x86 only.
installed = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
pytestmark = pytest.mark.cpu


@dataclass
class Result:
    scores: Tensor
    indices: Tensor
    name: str
    mask: Tensor


class Mixed(nn.Module):
    """Convolution, attention, integers, booleans, a scalar, and an output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, stride=2)
        self.norm = nn.BatchNorm2d(10)
        self.head = nn.Linear(10, 7)

    def forward(self, image: Tensor, *, scale: Tensor, shift: float = 0.5) -> Result:
        tokens = torch.relu(self.norm(self.stem(image))).flatten(2).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        scores = self.head(mixed) * scale + shift
        return Result(scores, scores.argmax(-1), "mixed", scores > 0)


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed().eval()


def batch(rows: int = 2, height: int = 13, width: int = 9, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(rows, 3, height, width, generator=draw)
    return {"image": image, "scale": torch.randn(1, generator=draw)}


@pytest.fixture(scope="module")
def applied() -> Any:
    return Plan((Openvino(),)).apply(mixed(), batch())


@installed
@pytest.mark.parametrize("seed", range(3))
def test_output_is_that_of_the_model(applied: Any, seed: int) -> None:
    given = batch(seed=seed)
    with torch.no_grad():
        expected, seen = mixed()(**given), applied(**given)
    assert isinstance(seen, Result) and seen.name == "mixed"
    assert relative_error([expected.scores], [seen.scores]) < 1e-5
    assert seen.indices.dtype == torch.int64 and torch.equal(seen.indices, expected.indices)
    assert seen.mask.dtype == torch.bool and torch.equal(seen.mask, expected.mask)


@installed
def test_results_of_earlier_calls_stay(applied: Any) -> None:
    first = applied(**batch(seed=1)).scores
    kept = first.clone()
    applied(**batch(seed=2))
    assert torch.equal(first, kept)


@installed
def test_another_shape_is_compiled_once(applied: Any) -> None:
    given = batch(rows=3, height=8, width=11)
    for _ in range(2):
        seen = applied(**given)
    with torch.no_grad():
        assert relative_error([mixed()(**given).scores], [seen.scores]) < 1e-5
    assert len(applied.model.engines) == 2


@installed
def test_float64_and_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    model = nn.Linear(5, 3).double().eval()
    given = torch.randn(4, 5, dtype=torch.float64)
    try:
        torch.set_num_threads(1)
        seen = Plan((Openvino(),)).apply(model, given)(given)
    finally:
        torch.set_num_threads(before)
    assert seen.dtype == torch.float64
    torch.testing.assert_close(seen, model(given).detach(), rtol=1e-5, atol=1e-5)  # it computes in fp32


@installed
def test_the_proof_counts_operators() -> None:
    job = Job.of(mixed(), (batch(),))
    rung = Openvino()
    proof = rung.proof(rung.apply(job))
    assert proof.endswith("operators run in OpenVINO; 1 input shape") and int(proof.split()[0]) > 3


@installed
def test_in_bf16() -> None:
    rung, given = Openvino(precision="bf16"), torch.randn(16, 96)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    if "bf16" not in CPU.hardware_dtypes:
        assert rung.why_not(CPU) == f"{CPU.name} has no bf16 in hardware"
        return
    job = rung.apply(Job.of(model, (given,)))
    assert job.precision == "bf16" and "of them in bf16" in rung.proof(job)
    with torch.no_grad():
        assert relative_error([model(given)], [job.finish()(given)]) < 0.02


def test_the_proof_is_empty_when_nothing_runs_in_bf16() -> None:
    """OpenVINO ignores the setting on a CPU without bf16."""
    engine = SimpleNamespace(operators=lambda: Counter({("FullyConnected", "f32"): 2}))
    job = Job.of(nn.Linear(2, 2)).with_evidence("openvino", SimpleNamespace(engines={"shape": engine}))
    assert Openvino(precision="bf16").proof(job) == ""
    assert Openvino().proof(job) == "2 operators run in OpenVINO; 1 input shape"


@installed
def test_a_model_that_cannot_be_exported() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(RungError, match="^openvino: compiling the model failed: .*[^.]\\.$"):
        Plan((Openvino(),)).apply(Branches(), torch.ones(3))


@installed
def test_no_usage_statistics_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("openvino.tools.ovc.telemetry_utils.tm.Telemetry", lambda *args, **kwargs: made.append(args))
    Plan((Openvino(),)).apply(nn.Linear(4, 3), torch.randn(2, 4))
    assert not made


def test_why_not() -> None:
    assert "on a CPU" in Openvino().why_not(GPU)
    bf16 = replace(CPU, hardware_dtypes=("fp32", "bf16"))
    assert "no bf16 in hardware" in Openvino(precision="bf16").why_not(replace(CPU, hardware_dtypes=("fp32",))) or (
        importlib.util.find_spec("openvino") is None
    )
    assert [rung.precision for rung in Openvino.variants(bf16)] == ["bf16", "keep"]
    assert Plan.parse("bf16").with_rung(Openvino()) == Plan((Openvino(),))


def test_why_not_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert Openvino().why_not(CPU) == 'openvino is not installed: pip install "redline[openvino]"'


@installed
def test_jobs_that_it_does_not_support() -> None:
    with pytest.raises(Unavailable, match="pass samples="):
        Plan((Openvino(),)).apply(mixed())
    half = replace(Job.of(mixed(), (batch(),)), precision="bf16")
    assert "needs an fp32 model" in Openvino().why_not(CPU, half)
