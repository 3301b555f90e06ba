"""fold_batchnorm: folds each BatchNorm into the weights of the preceding layer, for inference.

In inference a BatchNorm is a fixed scale and shift. It can be folded only if nothing else uses the output of the
preceding layer. Tracing the model with torch.fx shows this; in a model that cannot be traced, only neighbors in an
`nn.Sequential` are candidates. If there is a sample, one forward pass confirms that each BatchNorm receives the output
of its layer. The layer gets new weights, and the BatchNorm is replaced by a module that does nothing.
"""

import copy
import inspect
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.sample_run import on_device, state_preserved, watch_outputs
from redline.ladder.rung import Rung, Stage
from redline.ladder.workload import Inputs, call
from redline.machine.machine import Machine

# Compares exact types, because a subclass may use its weight differently.
_PARTNERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Pair = tuple[str, str]


class Folded(nn.Module):
    """Replaces a BatchNorm after a Linear. Checks that the input is 2-D, the only case in which folding is exact."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise RungError(f"fold_batchnorm: a BatchNorm folded into a Linear needs 2-D inputs, not {x.ndim}-D.")
        return x


@dataclass(frozen=True)
class FoldBatchnorm(Rung):
    name = "fold_batchnorm"
    stage = Stage.STRUCTURE
    summary = "BatchNorm folded into the preceding convolution or Linear"
    training = False

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None:
            return ""
        if not any(isinstance(m, _NORMS) for m in job.model.modules()):
            return "the model has no BatchNorm"
        if not find_pairs(job)[0]:
            return "no BatchNorm with fixed statistics directly follows a layer whose output is not used elsewhere"
        return ""

    def apply(self, job: Job) -> Job:
        pairs, method = find_pairs(job)
        for layer, norm in pairs:
            _fold(job.model, layer, norm)
        return job.with_evidence(self.name, (len(pairs), method))

    def proof(self, job: Job) -> str:
        folded, method = job.evidence[self.name]
        if not folded:
            return ""
        left = sum(isinstance(m, _NORMS) for m in job.model.modules())
        return f"{folded} BatchNorm(s) folded, {left} remaining; pairs found {method}"


def find_pairs(job: Job) -> tuple[list[Pair], str]:
    """Returns the names of every (layer, BatchNorm) pair that can be folded exactly, and the method that found them."""
    model = job.model
    candidates, method = _traced_pairs(job)
    if candidates is None:
        candidates = _neighbors_in_sequentials(model)
    pairs = [pair for pair in candidates if _may_fold(model, *pair)]
    if pairs and job.samples:
        confirmed = _confirmed_pairs(model, pairs, job.samples[0], job.device)
        pairs = [pair for pair in pairs if pair in confirmed]
        method += ", confirmed on a sample"
    return pairs, method


def _traced_pairs(job: Job) -> tuple[list[Pair] | None, str]:
    """Returns pairs that run once and where only the BatchNorm uses the layer's output; None if tracing fails."""
    in_sequentials = "inside nn.Sequential only"
    # Traces a copy that shares the weights, because user code may store the tracer's proxies.
    weights = [*job.model.parameters(), *job.model.buffers()]
    model = copy.deepcopy(job.model, {id(tensor): tensor for tensor in weights})
    optional = [p for p in inspect.signature(model.forward).parameters.values() if p.default is not p.empty]
    if optional and not job.samples:
        return None, f"{in_sequentials}, because without sample inputs the optional arguments are unknown"
    # The names of the arguments that a call with the sample passes.
    given = call(inspect.signature(model.forward).bind_partial, job.samples[0]).arguments if job.samples else ()
    try:
        fixed = {p.name: p.default for p in optional if p.name not in given}
        graph = fx.Tracer().trace(model, concrete_args=fixed or None)
    except Exception as error:
        return None, f"{in_sequentials}, because tracing raised {type(error).__name__}"
    modules = dict(model.named_modules(remove_duplicate=False))
    called = [node for node in graph.nodes if node.op == "call_module"]
    uses = Counter(id(modules[str(node.target)]) for node in called)
    # Layers whose weight is also read directly in the forward pass cannot be folded.
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    read_modules = {id(modules[name]) for name in read if name in modules}
    pairs = []
    for norm in called:
        layer = norm.args[0] if norm.args else None
        if not isinstance(layer, fx.Node) or layer.op != "call_module" or len(layer.users) != 1:
            continue
        ids = [id(modules[str(node.target)]) for node in (layer, norm)]
        if all(uses[i] == 1 and i not in read_modules for i in ids):
            pairs.append((str(layer.target), str(norm.target)))
    return pairs, "by tracing"


def _neighbors_in_sequentials(model: nn.Module) -> list[Pair]:
    pairs = []
    for name, module in model.named_modules():
        if type(module) is nn.Sequential:
            children = [f"{name}.{child}" if name else child for child in module._modules]
            pairs += list(zip(children, children[1:], strict=False))
    return pairs


def _may_fold(model: nn.Module, layer_name: str, norm_name: str) -> bool:
    """Returns whether the types match and neither the modules nor their weights are shared."""
    layer, norm = model.get_submodule(layer_name), model.get_submodule(norm_name)
    if _PARTNERS.get(type(layer)) is not type(norm):
        return False
    assert isinstance(norm, _NORMS)
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return False
    if isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)) and layer.groups != 1:
        return False
    if type(layer.weight) is not nn.Parameter or not layer.weight.is_floating_point():
        return False
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (layer, norm))
    if hooked or width != norm.num_features:
        return False
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    shared = any(owners[id(p)] > 1 for p in layer.parameters(recurse=False))
    return places[id(layer)] == places[id(norm)] == 1 and not shared


def _confirmed_pairs(model: nn.Module, pairs: list[Pair], sample: Inputs, device: torch.device) -> set[Pair]:
    """Returns the pairs whose BatchNorm receives exactly the output of its layer in one forward pass."""
    outputs: dict[str, Any] = {}
    agreed, broken = set(), set()
    with torch.no_grad(), state_preserved(model), ExitStack() as stack:
        for layer_name, norm_name in pairs:

            def compare(_module: nn.Module, inputs: Any, pair: Pair = (layer_name, norm_name)) -> None:
                same = bool(inputs) and inputs[0] is outputs.pop(pair[0], None)
                (agreed if same else broken).add(pair)

            stack.callback(model.get_submodule(norm_name).register_forward_pre_hook(compare).remove)
        stack.enter_context(watch_outputs({name: model.get_submodule(name) for name, _ in pairs}, outputs.__setitem__))
        call(model, on_device(sample, device))
    # Excludes layers whose last output no BatchNorm received, because that output is used elsewhere.
    return {pair for pair in agreed - broken if pair[0] not in outputs}


def _fold(model: nn.Module, layer_name: str, norm_name: str) -> None:
    layer: Any = model.get_submodule(layer_name)
    norm: Any = model.get_submodule(norm_name)
    old = layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    # Computed in fp64, so that the new weights are rounded only once.
    exact: list[Any] = [part.detach().double() if isinstance(part, Tensor) else part for part in old]
    if isinstance(layer, nn.Linear):
        weight, bias = fuse_linear_bn_weights(*exact)
    else:
        transposed = type(layer).__name__.startswith("ConvTranspose")
        weight, bias = fuse_conv_bn_weights(*exact, transpose=transposed)
    trainable, dtype = layer.weight.requires_grad, layer.weight.dtype
    layer.weight = nn.Parameter(weight.detach().to(dtype), trainable)
    layer.bias = nn.Parameter(bias.detach().to(dtype), trainable)
    parent, _, name = norm_name.rpartition(".")
    model.get_submodule(parent)._modules[name] = Folded() if isinstance(layer, nn.Linear) else nn.Identity()
