from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.tf32 import Tf32, strict_fp32, tf32
from redline.machine.machine import Machine

# Some releases of torch warn about the older switches, which these tests have to set.
pytestmark = pytest.mark.filterwarnings("ignore:Please use the new API settings")
CPU = Machine.detect("cpu")
AMPERE = replace(CPU, device="cuda:0", hardware_dtypes=("fp32", "tf32"), ceilings=None)
BACKENDS: Any = torch.backends
KEYS = [("generic", "all"), *(("cuda", op) for op in ("all", "matmul", "conv", "rnn"))]
KEYS += [("mkldnn", op) for op in ("all", "matmul", "conv", "rnn")]


def flags() -> dict[str, Any]:
    """Every switch of both generations, as torch reads it; the old ones raise when the two disagree."""
    seen: dict[str, Any] = {f"{b}.{op}": torch._C._get_fp32_precision_getter(b, op) for b, op in KEYS}
    old: dict[str, Callable[[], Any]] = {
        "cublas": torch._C._get_cublas_allow_tf32,
        "cudnn": torch._C._get_cudnn_allow_tf32,
        "matmul": torch.get_float32_matmul_precision,
    }
    for name, read in old.items():
        try:
            seen[name] = read()
        except RuntimeError:
            seen[name] = "mixed"
    return seen


def _reset() -> None:
    BACKENDS.fp32_precision = "none"
    BACKENDS.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for key, value in (("matmul", "none"), ("conv", "tf32"), ("rnn", "tf32")):
        torch._C._set_fp32_precision_setter("cuda", key, value)
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")


@pytest.fixture(autouse=True)
def default_flags() -> Iterator[None]:
    _reset()
    yield
    _reset()


def _set(path: str, value: Any) -> Callable[[], None]:
    def act() -> None:
        *parents, name = path.split(".")
        owner = BACKENDS
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)

    return act


# Convolution and recurrence differ, so torch does not tell what the old cuDNN switch says.
HALF_KNOWN = "old cudnn off, then new convolution on"
# What a user may have chosen before, in either generation of switches, and mixed.
STATES: dict[str, list[Callable[[], None]]] = {
    "default": [],
    "old matmul on": [_set("cuda.matmul.allow_tf32", True)],
    "old matmul off": [_set("cuda.matmul.allow_tf32", False)],
    "old cudnn off": [_set("cudnn.allow_tf32", False)],
    "high": [lambda: torch.set_float32_matmul_precision("high")],
    "medium": [lambda: torch.set_float32_matmul_precision("medium")],
    "new matmul on": [_set("cuda.matmul.fp32_precision", "tf32")],
    "new matmul off": [_set("cuda.matmul.fp32_precision", "ieee")],
    "new convolution off": [_set("cudnn.conv.fp32_precision", "ieee")],
    "new both cudnn off": [
        _set("cudnn.conv.fp32_precision", "ieee"),
        _set("cudnn.rnn.fp32_precision", "ieee"),
    ],
    "new everything off": [_set("fp32_precision", "ieee")],
    "new everything on": [_set("fp32_precision", "tf32")],
    "new cuda on": [_set("cudnn.fp32_precision", "tf32")],
    "high, then new off": [
        lambda: torch.set_float32_matmul_precision("high"),
        _set("cuda.matmul.fp32_precision", "ieee"),
    ],
    "old cudnn off, then new on": [
        _set("cudnn.allow_tf32", False),
        _set("cudnn.conv.fp32_precision", "tf32"),
        _set("cudnn.rnn.fp32_precision", "tf32"),
    ],
    HALF_KNOWN: [_set("cudnn.allow_tf32", False), _set("cudnn.conv.fp32_precision", "tf32")],
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("context", [tf32, strict_fp32])
def test_settings_are_restored_from_any_state(state: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    for act in STATES[state]:
        act()
    before, on = flags(), context is tf32
    with context():
        inside = flags()
    assert {inside[f"cuda.{op}"] for op in ("all", "matmul", "conv", "rnn")} == {"tf32" if on else "ieee"}
    assert inside["cublas"] is on
    assert state == HALF_KNOWN or inside["cudnn"] is on
    assert flags() == before
    # What was inherited is still inherited: changing the parent afterwards reaches the same switches.
    BACKENDS.fp32_precision = "none"
    BACKENDS.cudnn.fp32_precision = "none"
    after_context = flags()
    _reset()
    for act in STATES[state]:
        act()
    BACKENDS.fp32_precision = "none"
    BACKENDS.cudnn.fp32_precision = "none"
    assert flags() == after_context


@pytest.mark.parametrize("context", [tf32, strict_fp32])
def test_restored_when_the_call_raises(context: Callable[[], AbstractContextManager[None]]) -> None:
    before = flags()
    with pytest.raises(ZeroDivisionError), context():
        raise ZeroDivisionError
    assert flags() == before


def test_old_settings_can_be_read_during_calls() -> None:
    with tf32():
        assert BACKENDS.cuda.matmul.allow_tf32 is True
        assert BACKENDS.cudnn.allow_tf32 is True
        assert torch.get_float32_matmul_precision() == "high"


class Watcher(nn.Module):
    """Notes the switches while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(1, 2, 3)
        self.embed = nn.Embedding(3, 4)
        self.norm = nn.LayerNorm((4, 4))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(BACKENDS.cuda.matmul.fp32_precision)
        return self.conv(self.linear(x)[:, None])


def test_enabled_during_calls_and_counted() -> None:
    model = Watcher()
    job = Tf32().apply(Job.of(model))
    assert Tf32().proof(job) == ""
    applied = job.finish()
    before = flags()
    for _ in range(3):
        applied(torch.randn(2, 4))
    assert flags() == before
    assert job.model.seen == ["tf32"] * 3
    assert model.seen == []
    assert job.precision == "tf32"
    assert Tf32().proof(job) == (
        "TF32 enabled in 3 call(s), for 1 layer(s) with matrix products "
        "and 1 convolution(s) (enabled before by torch's default)"
    )


def test_on_during_a_training_step_with_its_backward_pass() -> None:
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(BACKENDS.cuda.matmul.fp32_precision)
            return grad

    job = Job.of(
        nn.Linear(4, 2),
        loss=lambda y, batch: Noting.apply(y).square().mean(),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    before = flags()
    Tf32().apply(job).finish()(torch.randn(3, 4))
    assert seen == ["tf32"]
    assert flags() == before


def test_why_not() -> None:
    assert "TF32" in Tf32().why_not(CPU)
    assert Tf32().why_not(AMPERE) == ""
    assert Tf32().why_not(AMPERE, Job.of(Watcher())) == ""
    assert "no fp32 matrix product" in Tf32().why_not(AMPERE, Job.of(nn.Embedding(3, 4)))
    assert "no fp32 matrix product" in Tf32().why_not(AMPERE, Job.of(nn.Linear(3, 4).double()))
    assert "computes in fp16" in Tf32().why_not(AMPERE, Job.of(nn.Linear(3, 4).half()))
    assert "bf16" in Tf32().why_not(AMPERE, replace(Job.of(Watcher()), precision="bf16"))
    for layer in (
        nn.GRU(3, 4),
        nn.MultiheadAttention(4, 2),
        nn.Bilinear(2, 3, 4),
        nn.ConvTranspose2d(2, 3, 3),
    ):
        assert Tf32().why_not(AMPERE, Job.of(layer)) == ""


def test_proof_is_empty_without_a_supported_layer() -> None:
    job = Tf32().apply(Job.of(nn.ReLU()))
    job.finish()(torch.randn(2))
    assert Tf32().proof(job) == ""


def test_plan_round_trip() -> None:
    assert Plan.parse(str(Plan((Tf32(),)))) == Plan((Tf32(),))


@pytest.mark.gpu
def test_on_cuda_it_rounds_to_tf32_and_only_inside() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256)).cuda().eval()
    x = torch.randn(256, 512, device="cuda")
    with torch.no_grad():
        strict = model(x)
        expected = model.double()(x.double())
        model.float()
    plan, job = Plan.parse("tf32").build(Job.of(model), Machine.detect("cuda"))
    seen = job.finish()(x)
    assert relative_error([expected], [strict]) < 1e-6
    # Ten bits of mantissa leave an error of this size: none at all would mean that TF32 was not used.
    assert 1e-5 < relative_error([expected], [seen]) < 1e-3
    with torch.no_grad():
        assert torch.equal(model(x), strict)
    assert plan.rungs[0].proof(job)


@pytest.mark.gpu
def test_on_cuda_under_a_compiler() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda().eval()
    x = torch.randn(128, 256, device="cuda")
    with torch.no_grad():
        expected = model.double()(x.double())
        model.float()
    job = Tf32().apply(Job.of(model))
    applied = replace(job, model=torch.compile(job.model)).finish()
    before = flags()
    assert 1e-5 < relative_error([expected], [applied(x)]) < 1e-3
    assert flags() == before
