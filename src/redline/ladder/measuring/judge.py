"""Evaluates the gates on the outputs of a plan, and checks that the workload's outputs can serve as a reference."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import GateError, Refused, WorkloadError
from redline.ladder.gate import Gate, Score, all_finite, gates_for, tensors_of, values_of, worst
from redline.ladder.rewrites.state import find_state
from redline.ladder.workload import Inputs, Workload
from redline.machine.trees import tree_map_only

TRAINING_STEPS = 3
# The output must change by more than this between two inputs, relative to its norm.
_SENSITIVITY = 1e-6
# The change of the output between two inputs must equal the reference's change up to this relative error.
_MAX_DIFFERENCE_ERROR = 0.5


def judge(gates: Sequence[Gate], expected: Sequence[Any], outputs: Sequence[Any]) -> list[Score]:
    """Returns one score per gate: the worst over the batches, or NaN if any output is not finite."""
    scores = []
    for gate in gates_for(gates, expected):
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
    """Raises Refused if the outputs pass the gates but no longer depend on the input as the reference outputs do.

    If outputs differ little between inputs, an error within the limits can be as large as the effect of the input.
    """
    changes = []
    for results in (expected, outputs):
        floats = [[t for t in values_of(r) if t.is_floating_point()] for r in results[:2]]
        if not all(floats) or (pair := _in_common(*floats)) is None:
            return
        changes.append(pair[0].cpu() - pair[1].cpu())
    reference, seen = changes
    if reference.shape == seen.shape and not (seen - reference).norm() <= _MAX_DIFFERENCE_ERROR * reference.norm():
        raise Refused("the output no longer follows the input: between two batches it changes unlike the reference")


def worst_per_gate(scores: Sequence[Score], shapes: int) -> list[Score]:
    """Returns the worst score of each gate; `scores` lists all gates for the first shape, then for the next shape."""
    count = len(scores) // shapes
    return [worst(scores[gate::count]) for gate in range(count)] if count else []


def check_same_model(workloads: Mapping[str, Workload], device: str) -> None:
    """Raises WorkloadError if the models for the shapes have different weights: one model must run all shapes."""
    if len(workloads) < 2:
        return
    (first, workload), *others = workloads.items()
    sizes = _sizes(workload.fresh_model(device))
    for label, other in others:
        if _sizes(other.fresh_model(device)) != sizes:
            raise WorkloadError(
                f"{workload.label}: the model of shape {label} has different weights from that of {first}, but a shape "
                "may only change the inputs: climb them separately"
            )


def _sizes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_state(workload: Workload, model: nn.Module, run: Callable[..., Any], batches: Sequence[Inputs]) -> str:
    """Returns a sentence on the state that a model keeps between calls; raises WorkloadError if outputs are random."""
    state = find_state(model, lambda batch: workload.step(run, batch), batches, workload.gates)
    if state.random:
        raise WorkloadError(
            f"{workload.label}: {state}, so its outputs cannot be compared: disable it in build(), for example with p=0"
        )
    return str(state)


def check_reference(workload: Workload, seeds: Sequence[int], results: Sequence[Any]) -> None:
    """Raises WorkloadError if the untouched model's outputs cannot serve as a reference."""
    for seed, result in zip(seeds, results, strict=True):
        if not tensors_of(result):
            kind = "None" if result is None else f"a {type(result).__name__}"
            raise WorkloadError(
                f"{workload.label}: the model returned {kind} without tensors, so it cannot be judged: "
                "return tensors, or tuples, lists, dicts or dataclasses of them"
            )
        if not all_finite(result):
            raise WorkloadError(f"{workload.label}: the untouched model gives NaN or infinity on inputs({seed})")
    common = _in_common(*(values_of(result) for result in results[:2]))
    if common is not None:
        first, second = common
        change = float((first - second).norm() / first.norm().clamp_min(1e-300))
        if not change > _SENSITIVITY:
            _check_inputs(workload, seeds[0], seeds[1], results)
            raise WorkloadError(
                f"{workload.label}: the output does not react to the input (it changes by {change:.1g} between two "
                "batches), so a speed-up would be meaningless"
            )


def _in_common(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Flattens two outputs, cropped to their common sizes because batches may differ in length.

    Returns None if the outputs differ in number or dimensions.
    """
    if [tensor.ndim for tensor in one] != [tensor.ndim for tensor in other]:
        return None
    cut: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in zip(one, other, strict=True):
        common = tuple(slice(min(sizes)) for sizes in zip(*(tensor.shape for tensor in pair), strict=True))
        for tensors, tensor in zip(cut, pair, strict=True):
            tensors.append(tensor[common].double().flatten())
    return torch.cat(cut[0]), torch.cat(cut[1])


def _check_inputs(workload: Workload, first: int, second: int, results: Sequence[Any]) -> None:
    """Raises WorkloadError if the outputs are equal only because the inputs are empty or equal."""
    device = str(tensors_of(results[0])[0].device)
    one, other = (tensors_of(workload.fresh_inputs(seed, device)) for seed in (first, second))
    if one and not any(tensor.numel() for tensor in one):
        raise WorkloadError(f"{workload.label}: inputs({first}) is empty (a batch of 0?), so nothing is computed")
    if len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
        raise WorkloadError(
            f"{workload.label}: inputs({first}) and inputs({second}) are equal, so nothing shows that the output "
            "reacts to the input: make them depend on the seed (torch's seed is set before each call)"
        )


def losses_and_gradients(
    run: Any, batches: Sequence[Inputs], after_first: Callable[[], None] | None = None
) -> list[Tensor]:
    """Trains a few steps; returns their losses and then the first step's gradients, which training gates compare."""
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for batch in batches:
        torch.manual_seed(7)  # every plan gets the same dropout
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
    """Copies the output, because a later call may overwrite it."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), output)


def as_dtype(tree: Any, dtype: str) -> Any:
    """Converts the floating-point tensors of a nested structure to fp32 or fp64."""
    target = {"fp32": torch.float32, "fp64": torch.float64}[dtype]
    return tree_map_only(Tensor, lambda leaf: leaf.to(target) if leaf.is_floating_point() else leaf, tree)
