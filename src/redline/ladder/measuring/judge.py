"""Whether a plan's output is still good: what is compared, by which gates, and whether it can be judged at all."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redline.errors import GateError, Refused, WorkloadError
from redline.ladder.gate import Gate, Score, all_finite, tensors_of, worst
from redline.ladder.workload import Inputs, Workload

TRAINING_STEPS = 3
# Below this relative change, an output does not react to its input.
_SENSITIVITY = 1e-6
# The share of the difference between two batches that may be lost; more, and the output no longer follows the input.
_LOST = 0.5
# What whole-number outputs beside floating-point ones are judged by, unless the workload has such a gate itself.
AGREEMENT = Gate("agreement", 0.99)


def judge(gates: Sequence[Gate], expected: Sequence[Any], outputs: Sequence[Any]) -> list[Score]:
    """One score per gate: its worst over the batches, and NaN where any output is not finite."""
    scores = []
    kinds = {tensor.is_floating_point() for tensor in tensors_of(list(expected)) if tensor.numel()}
    if kinds == {True, False} and not any(gate.metric == AGREEMENT.metric for gate in gates):
        gates = (*gates, AGREEMENT)  # most metrics look at the floats alone
    for gate in gates:
        if not all(all_finite(o) for o in outputs):
            scores.append(Score(gate.metric, float("nan"), gate.limit, gate.direction, False))
            continue
        try:
            scores.append(worst([gate.judge(e, o) for e, o in zip(expected, outputs, strict=True)]))
        except GateError as error:
            raise Refused(str(error)) from error
    if len(outputs) > 1 and all(score.passed for score in scores):
        _check_reaction(expected, outputs)
    return scores


def _check_reaction(expected: Sequence[Any], outputs: Sequence[Any]) -> None:
    """An error inside every limit can still be all that the input contributes, where outputs hardly differ."""
    changes = []
    for results in (expected, outputs):
        floats = [[t for t in tensors_of(r) if t.is_floating_point()] for r in results[:2]]
        if not all(floats) or (pair := _in_common(*floats)) is None:
            return
        changes.append(pair[0].cpu() - pair[1].cpu())
    reference, seen = changes
    if reference.shape == seen.shape and not (seen - reference).norm() <= _LOST * reference.norm():
        raise Refused("what the input changes in the output is lost: two batches differ otherwise than they should")


def worst_per_gate(scores: Sequence[Score], shapes: int) -> list[Score]:
    """One score per gate over several shapes, whose scores follow each other in the order of the gates."""
    count = len(scores) // shapes
    return [worst(scores[gate::count]) for gate in range(count)] if count else []


def check_reference(workload: Workload, seeds: Sequence[int], results: Sequence[Any]) -> None:
    """Raises when the untouched model's outputs are no ground to judge on."""
    for seed, result in zip(seeds, results, strict=True):
        if not tensors_of(result):
            raise WorkloadError(
                f"{workload.label}: the model returned {_kind(result)} in which no tensor is seen, so there is nothing "
                "to judge: return tensors, or tuples, lists or dicts of them"
            )
        if not all_finite(result):
            raise WorkloadError(f"{workload.label}: the untouched model gives NaN or infinity on inputs({seed})")
    common = _in_common(*(tensors_of(result) for result in results[:2]))
    if common is not None:
        first, second = common
        change = float((first - second).norm() / first.norm().clamp_min(1e-300))
        if not change > _SENSITIVITY:
            _check_inputs(workload, seeds[0], seeds[1], results)
            raise WorkloadError(
                f"{workload.label}: the output does not react to the input (it changes by {change:.1g} between two "
                "batches), so no speed-up of it would mean anything"
            )


def _in_common(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two outputs as numbers, cut to the sizes that both have, since batches may differ in length; None if in kind."""
    if [tensor.ndim for tensor in one] != [tensor.ndim for tensor in other]:
        return None
    cut: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in zip(one, other, strict=True):
        common = tuple(slice(min(sizes)) for sizes in zip(*(tensor.shape for tensor in pair), strict=True))
        for tensors, tensor in zip(cut, pair, strict=True):
            tensors.append(tensor[common].double().flatten())
    return torch.cat(cut[0]), torch.cat(cut[1])


def _kind(result: Any) -> str:
    return "nothing" if result is None else f"a {type(result).__name__}"


def _check_inputs(workload: Workload, first: int, second: int, results: Sequence[Any]) -> None:
    """Raises when it is the inputs' fault that two outputs are alike."""
    device = str(tensors_of(results[0])[0].device)
    one, other = (tensors_of(workload.fresh_inputs(seed, device)) for seed in (first, second))
    if one and not any(tensor.numel() for tensor in one):
        raise WorkloadError(
            f"{workload.label}: inputs({first}) holds no element (a batch of 0?), so nothing is computed"
        )
    if len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
        raise WorkloadError(
            f"{workload.label}: inputs({first}) and inputs({second}) are the same, so nothing shows that the output "
            "reacts to them; make them differ by the seed (torch's is set before each call)"
        )


def losses_and_gradients(
    run: Any, batches: Sequence[Inputs], after_first: Callable[[], None] | None = None
) -> list[Tensor]:
    """Trains a few steps: their losses, then the first step's gradients, which is what training gates compare."""
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for batch in batches:
        torch.manual_seed(7)  # the same dropout for every arm
        losses.append(run(batch).float().clone())
        if not gradients:
            if after_first is not None:
                after_first()
            found = run.gradients()
            if not found:
                raise WorkloadError("the training step left no gradient, so it cannot be judged")
            gradients = [found[name].detach().float().clone() for name in sorted(found)]
    return [torch.stack(losses), *gradients]


def detached(output: Any) -> Any:
    """A copy, because a later call may overwrite what an earlier one returned."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, output)


def as_dtype(tree: Any, dtype: str) -> Any:
    """The same tree with its floats in fp32 or fp64."""
    target = {"fp32": torch.float32, "fp64": torch.float64}[dtype]

    def convert(leaf: Any) -> Any:
        return leaf.to(target) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(convert, tree)
