"""Outputs of any structure: dataclasses, named tuples, nested dicts, None, strings, integers and complex numbers."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from redline.errors import Refused
from redline.ladder.gate import AGREEMENT, INFERENCE_GATES, Gate, gates_for, tensors_of, values_of
from redline.ladder.job import Job
from redline.ladder.measuring.judge import check_reference, judge
from redline.ladder.plan import Plan
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.workload import Workload
from redline.machine.trees import tree_flatten, tree_map_only, tree_unflatten

pytestmark = pytest.mark.usefixtures("quick_onnx_export")


@dataclass
class Result:
    logits: Tensor
    label: str = "cat"
    hidden: "Result | None" = None
    notes: list[str] = field(default_factory=list, init=False)


@dataclass(frozen=True)
class Doubled:
    """Its constructor takes other arguments than its fields."""

    value: Tensor = field(init=False)
    given: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", 2 * self.given)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Named(dict[str, Any]):
    pass


class Structured(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


STRUCTURES: dict[str, Any] = {
    "dataclass": lambda y: Result(y, hidden=Result(y + 1)),
    "frozen dataclass": Doubled,
    "named tuple": lambda y: Pair(y, None),
    "nested dict": lambda y: {"a": {"b": [y, None]}, "label": "cat"},
    "subclass of dict": lambda y: Named(y=y, z=Result(y)),
    "complex": lambda y: torch.complex(y, y + 1),
    "number": lambda y: (y, 3, "cat"),
}


def test_dataclasses_are_taken_apart_and_put_together() -> None:
    value = {"x": Result(torch.ones(2), hidden=Result(torch.zeros(3)))}
    value["x"].notes.append("said")
    leaves, structure = tree_flatten(value)
    again = tree_unflatten(leaves, structure)
    assert isinstance(again["x"].hidden, Result) and again["x"].notes == ["said"] and again["x"].label == "cat"
    assert [tensor.numel() for tensor in tensors_of(value)] == [2, 3]
    doubled = tree_map_only(Tensor, lambda tensor: tensor + 1, Doubled(torch.ones(1)))
    assert isinstance(doubled, Doubled) and doubled.value.tolist() == [3.0] and doubled.given.tolist() == [2.0]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("plan", ["eager", "bf16", "compile", "onnxruntime"])
def test_every_structure_comes_back_from_a_plan(kind: str, plan: str) -> None:
    if plan in ("onnxruntime", "bf16") and kind == "complex":
        pytest.skip("there are no complex numbers of bf16, and none in ONNX")
    if plan == "compile":
        torch.compiler.reset()
    torch.manual_seed(0)
    model, batch = Structured(STRUCTURES[kind]).eval(), torch.randn(4, 64)
    with torch.no_grad():
        expected = model(batch)
    # A CPU may have no bf16, so `why_not` is not asked.
    fast = Bf16().apply(Job.of(model)).finish() if plan == "bf16" else Plan.parse(plan).apply(model, batch)
    seen = fast(batch)
    assert type(seen) is type(expected)
    (one, structure), (other, same) = tree_flatten(expected), tree_flatten(seen)
    assert structure == same
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)
        else:
            assert a == b


def test_integers_are_judged_by_agreement() -> None:
    tokens = torch.arange(100)
    other = torch.where(tokens < 5, -1, tokens)
    assert gates_for(INFERENCE_GATES, [tokens]) == (AGREEMENT,)
    assert [score.passed for score in judge(INFERENCE_GATES, [tokens], [tokens])] == [True]
    assert [str(score) for score in judge(INFERENCE_GATES, [tokens], [other])] == ["agreement 0.95 (outside ≥ 0.99)"]
    own = (Gate("top1", 0.9),)
    assert gates_for(own, [tokens]) == own
    with pytest.raises(Refused, match="floating-point"):
        judge((Gate("relative_error", 0.1),), [tokens], [tokens])


def test_complex_numbers_are_judged_as_pairs() -> None:
    value = torch.randn(8, dtype=torch.complex64)
    assert values_of(value.conj())[0].shape == (8, 2)
    assert all(score.passed for score in judge(INFERENCE_GATES, [value], [value * 1.001]))
    assert not all(score.passed for score in judge(INFERENCE_GATES, [value], [value.conj()]))


def test_changed_numbers_and_strings_are_found() -> None:
    logits = torch.randn(8)
    assert all(score.passed for score in judge(INFERENCE_GATES, [(logits, 3, "cat")], [(logits, 3, "cat")]))
    assert not all(score.passed for score in judge(INFERENCE_GATES, [(logits, 3)], [(logits, 4)]))
    assert not all(score.passed for score in judge(INFERENCE_GATES, [(logits, "cat")], [(logits, "car")]))


def test_a_model_of_integers_serves_as_a_reference() -> None:
    workload = Workload(nn.Identity, lambda seed: torch.randint(50, (20,)))
    batches = [workload.fresh_inputs(seed, "cpu") for seed in (0, 1)]
    check_reference(workload, (0, 1), batches)
    fast = Plan().apply(nn.Identity().eval(), batches[0])
    assert torch.equal(fast(batches[0]), batches[0])
