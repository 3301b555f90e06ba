"""The checks of outputs, and whether the model or its inputs are the reason if an output does not react."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from redline.errors import Refused, WorkloadError
from redline.ladder.gate import Gate
from redline.ladder.measuring.judge import check_reference, judge, worst_per_gate
from redline.ladder.workload import Inputs, Workload

SEEDS = (10, 11)
FIXED = torch.randn(3, 5)


def check(inputs: Callable[[int], Inputs], model: Callable[[Tensor], Tensor]) -> None:
    workload = Workload(lambda: torch.nn.Identity(), inputs, name="mine")
    check_reference(workload, SEEDS, [model(workload.fresh_inputs(seed, "cpu")) for seed in SEEDS])


def test_inputs_that_ignore_their_seed() -> None:
    with pytest.raises(WorkloadError, match=r"mine: inputs\(10\) and inputs\(11\) are equal"):
        check(lambda seed: FIXED, lambda x: x * 2)


def test_an_empty_batch() -> None:
    with pytest.raises(WorkloadError, match=r"mine: inputs\(10\) is empty \(a batch of 0\?\)"):
        check(lambda seed: torch.randn(0, 5), lambda x: x * 2)


def test_a_model_that_ignores_its_input_is_refused() -> None:
    with pytest.raises(WorkloadError, match="the output does not react to the input"):
        check(lambda seed: torch.randn(3, 5), lambda x: FIXED)
    check(lambda seed: torch.randn(3, 5), lambda x: x * 2)


@pytest.mark.parametrize("other", [2, 5])
def test_batches_of_different_lengths_are_cropped_to_compare(other: int) -> None:
    def inputs(seed: int) -> Tensor:
        return torch.randn(3 if seed == SEEDS[0] else other, 5)

    with pytest.raises(WorkloadError, match="the output does not react to the input"):
        check(inputs, lambda x: torch.ones_like(x))
    check(inputs, lambda x: x * 2)


def test_the_error_for_outputs_without_tensors_names_their_type() -> None:
    with pytest.raises(WorkloadError, match="returned a SimpleNamespace without tensors"):
        check(lambda seed: torch.randn(3, 5), lambda x: SimpleNamespace(logits=x))


LOOSE = [Gate("max_error", 10.0)]


def test_an_output_within_the_gates_that_ignores_its_input_is_refused() -> None:
    """Two outputs hardly differ, so an error within the limit can be as large as the effect of the input."""
    expected = [torch.full((4,), 100.0), torch.full((4,), 100.1)]
    with pytest.raises(Refused, match="the output no longer follows the input"):
        judge(LOOSE, expected, [expected[0], expected[0]])
    # The error of the difference may be at most half of it.
    judge(LOOSE, expected, [expected[0], torch.full((4,), 100.06)])
    with pytest.raises(Refused):
        judge(LOOSE, expected, [expected[0], torch.full((4,), 100.04)])
    # A single output and outputs without floats cannot be checked.
    assert judge(LOOSE, expected[:1], [expected[0]])[0].passed
    whole = [torch.tensor([1, 2]), torch.tensor([2, 3])]
    assert judge([Gate("agreement", 0.0)], whole, [whole[0], whole[0]])[0].passed


def test_single_or_integer_outputs_are_not_checked_for_reaction() -> None:
    expected = [torch.ones(2, 3), torch.ones(6)]
    assert judge(LOOSE, expected, [torch.ones(2, 3), torch.ones(6)])[0].passed


def test_integers_beside_floats_get_a_gate_of_their_own() -> None:
    expected = (torch.ones(3), torch.tensor([1, 2]))
    metrics = [score.metric for score in judge(LOOSE, [expected], [expected])]
    assert metrics == ["max_error", "agreement"]
    given = [*LOOSE, Gate("agreement", 0.5)]
    assert [score.limit for score in judge(given, [expected], [expected])] == [10.0, 0.5]
    assert len(judge(LOOSE, [expected[0]], [expected[0]])) == 1


def test_the_worst_shape_decides_for_each_gate() -> None:
    gates = [Gate("max_error", 1.0), Gate("relative_error", 0.5)]
    scores = [s for error in (0.1, 0.3) for s in judge(gates, [torch.ones(2)], [torch.ones(2) + error])]
    assert [round(score.value, 3) for score in worst_per_gate(scores, shapes=2)] == [0.3, 0.3]
    assert worst_per_gate([], shapes=2) == []
