"""Finds what makes a model's output depend on more than its input: state kept between calls, and random operations.

An exported graph cannot keep such state, and the output of a model with random operations cannot be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redline.ladder.gate import Gate, GateError, gates_for, values_of
from redline.ladder.job import CallState
from redline.ladder.rewrites.io_adapter import unwrapped
from redline.ladder.rewrites.sample_run import state_preserved
from redline.ladder.workload import Inputs


def find_state(
    model: nn.Module, run: Callable[[Inputs], Any], batches: Sequence[Inputs], gates: Sequence[Gate]
) -> CallState:
    """Runs the model a few times and restores its state; an output counts as changed if it fails the gates."""
    module = unwrapped(model)
    first, between = batches[0], batches[-1]

    def output(batch: Inputs, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [value.detach().clone() for value in values_of(run(batch))]

    with state_preserved(model), torch.no_grad():
        torch.manual_seed(0)
        before_any = torch.get_rng_state()
        once = output(first, 0)  # also fills caches, so that later calls only read them
        # Whether the call sampled random numbers. On a GPU this cannot be observed here and is assumed.
        draws = any(p.is_cuda for p in model.parameters()) or not torch.equal(before_any, torch.get_rng_state())
        before = _snapshot(module)
        output(between, 0)
        again = output(first, 0)
        after = _snapshot(module)
        changed = {name for name, value in after.items() if name not in before or not _equal(value, before[name])}
        buffers = {name for name, _ in module.named_buffers()} & changed
        kept = [_describe_buffer(module, name) for name in sorted(buffers)]
        if not buffers and _differ(gates, once, again):
            kept = [f"attribute {name!r}" for name in sorted(changed)] or ["outside of its buffers and attributes"]
        is_random = draws and (bool(kept) or _differ(gates, again, output(first, 1)))
    random = (active_dropout(module) or ["an operation in its forward pass"]) if is_random else []
    return CallState(tuple(dict.fromkeys(kept)), tuple(random))


def active_dropout(model: nn.Module) -> list[str]:
    """Returns the names of modules whose dropout is active."""
    kinds = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)
    rates = {
        name: getattr(module, "p", getattr(module, "dropout", 0.0))
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.training
    }
    return [f"dropout of {rate:g} in {name!r}" for name, rate in rates.items() if rate]


def training_layers(model: nn.Module) -> list[str]:
    """Returns the names of layers whose results in training mode differ from those after `eval()`."""
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    return [*active_dropout(model), *(f"batch norm {name!r} in train mode" for name in norms)]


def _describe_buffer(model: nn.Module, name: str) -> str:
    owner = name.rpartition(".")[0]
    if isinstance(model.get_submodule(owner), nn.modules.batchnorm._BatchNorm):
        return f"batch norm {owner!r} in train mode"
    return f"buffer {name!r}"


def _differ(gates: Sequence[Gate], one: list[Tensor], other: list[Tensor]) -> bool:
    try:
        return not all(gate.judge(one, other).passed for gate in gates_for(gates, one))
    except GateError:
        return True  # the number or the shapes of the outputs have changed


def _snapshot(model: nn.Module) -> Mapping[str, Any]:
    """Returns copies of the model's buffers and of its other attributes, by name."""
    base = vars(nn.Module())
    values: dict[str, Any] = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        values |= {f"{prefix}.{key}".lstrip("."): v for key, v in vars(module).items() if key not in base}
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return len(value) if isinstance(value, (list, dict, set)) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    kinds = (bool, int, float, str, type(None))
    return one == other if isinstance(one, kinds) and isinstance(other, kinds) else one is other
