"""align: pads the channel counts of layers with zeros to a multiple of 8, so that tensor cores can be used.

Tensor cores multiply in tiles of 8 channels (of 16-bit values); a layer with 53 channels uses slower kernels or wastes
part of a tile. The padding does not change the result: extra input channels are zero and have zero weights, and extra
output channels are cut. Padding and cutting copy the tensor. Therefore, if only channel-wise modules are between two
padded layers of an `nn.Sequential`, the padded tensor is passed on without a cut.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

# Elementwise modules can run on padded tensors: they do not mix channels, and extra channels get zero weights later.
_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Dropout,
)  # fmt: skip
# Modules that process each channel separately; between convolutions they can run on padded tensors too.
_CHANNELWISE = (
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample, nn.Dropout2d,
    nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
)  # fmt: skip


def _widths(layer: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Returns the number of input and output channels (or features)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


class Padded(nn.Module):
    """A Conv2d or Linear with padded weights and the interface of the original layer."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, multiple: int) -> None:
        super().__init__()
        self.inputs, self.outputs = _widths(layer)
        self.is_linear = isinstance(layer, nn.Linear)
        self.extra_inputs, self.extra_outputs = -self.inputs % multiple, -self.outputs % multiple
        # Changes the layer in place, because the job owns it.
        sides = (0, self.extra_inputs, 0, self.extra_outputs)
        wider = F.pad(layer.weight.detach(), sides if self.is_linear else (0, 0, 0, 0, *sides))
        self.added = wider.numel() - layer.weight.numel()
        layer.weight = nn.Parameter(wider, layer.weight.requires_grad)
        if layer.bias is not None:
            bias = F.pad(layer.bias.detach(), (0, self.extra_outputs))
            layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
        names = ("in_features", "out_features") if self.is_linear else ("in_channels", "out_channels")
        for name, extra in zip(names, (self.extra_inputs, self.extra_outputs), strict=True):
            setattr(layer, name, getattr(layer, name) + extra)
        self.layer = layer
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """The unpadded weight, for code that reads it without calling the layer."""
        return self.layer.weight[: self.outputs, : self.inputs]

    @property
    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.layer.bias[: self.outputs]

    def forward(self, x: Tensor, input_is_padded: bool = False, keep_padding: bool = False) -> Tensor:
        if self.extra_inputs and not input_is_padded:
            x = F.pad(x, (0, self.extra_inputs) if self.is_linear else (0, 0, 0, 0, 0, self.extra_inputs))
        x = self.layer(x)
        if self.extra_outputs and not keep_padding:
            # Channels are dimension -3, with or without a batch. `clone` makes the tensor dense, so that `.view` works.
            x = x.narrow(-1 if self.is_linear else -3, 0, self.outputs).clone()
        return x

    def extra_repr(self) -> str:
        return f"{self.inputs}+{self.extra_inputs} -> {self.outputs}+{self.extra_outputs}"


class PaddedSequential(nn.Sequential):
    """A Sequential that passes padded tensors on between its children where possible."""

    def __init__(self, children: "OrderedDict[str, nn.Module]", joints: set[int]) -> None:
        super().__init__(children)
        # The indices of the children that pass their padded output on to the next Padded layer.
        self.joints = frozenset(joints)

    def forward(self, input: Tensor) -> Tensor:
        padded = False
        for index, child in enumerate(self):
            if isinstance(child, Padded):
                keep_padding = index in self.joints
                input = child(input, padded, keep_padding)
                padded = keep_padding
            else:
                input = child(input)
        return input


@dataclass(frozen=True)
class Align(Rung):
    name = "align"
    stage = Stage.LAYOUT
    summary = "channel counts padded to a multiple of 8 for tensor cores"
    training = False

    multiple: int = option(8, "pad channel counts to a multiple of this number", at_least=2)

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if "tensor cores" not in machine.features:
            return f"{machine.name} has no tensor cores"
        if job is not None and not find_unaligned(job.model, self.multiple):
            return f"the channel counts of all plain Conv2d and Linear layers are multiples of {self.multiple}"
        return ""

    def apply(self, job: Job) -> Job:
        found = find_unaligned(job.model, self.multiple)
        new: dict[nn.Module, nn.Module] = {layer: Padded(layer, self.multiple) for layer in found}
        model = _swap(job.model, new)
        chains = {m: joined for m in model.modules() if (joined := _join(m)) is not None}
        return replace(job, model=_swap(model, chains))

    def proof(self, job: Job) -> str:
        padded = [m for m in job.model.modules() if isinstance(m, Padded)]
        if not padded:
            return ""
        joints = sum(len(m.joints) for m in job.model.modules() if isinstance(m, PaddedSequential))
        added, now = sum(m.added for m in padded), sum(m.layer.weight.numel() for m in padded)
        return (
            f"{len(padded)} layers padded to multiples of {self.multiple}: {added:,} more multiply-adds per "
            f"output position (+{added / (now - added):.1%} in those layers), cut-and-pad pairs avoided: {joints}"
        )


def find_unaligned(model: nn.Module, multiple: int) -> list[nn.Conv2d | nn.Linear]:
    """Returns the layers that padding would change; skips subclasses and grouped, quantized or hooked layers."""
    found = []
    for module in model.modules():
        # Compares exact types, because a subclass may use its weight differently.
        if type(module) not in (nn.Conv2d, nn.Linear) or getattr(module, "groups", 1) != 1:
            continue
        assert isinstance(module, (nn.Conv2d, nn.Linear))
        plain = type(module.weight) is nn.Parameter and module.weight.is_floating_point()
        if plain and not _hooked(module) and any(width % multiple for width in _widths(module)):
            found.append(module)
    return found


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _swap(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replaces modules in all places where they are used; a module that is used twice gets a single replacement."""
    for parent in [*model.modules(), *new.values()]:
        if isinstance(parent, Padded):
            continue
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def _join(module: nn.Module) -> PaddedSequential | None:
    """Returns a PaddedSequential with the same children, or None if no padded tensor can be passed on between them."""
    if type(module) is not nn.Sequential or _hooked(module):
        return None
    joints: set[int] = set()
    last: tuple[int, Padded] | None = None
    for index, child in enumerate(module):
        if isinstance(child, Padded):
            if last and last[1].is_linear == child.is_linear and last[1].outputs == child.inputs:
                joints.add(last[0])
            last = (index, child) if child.extra_outputs else None
        elif last is not None:
            apart = type(child) in _ELEMENTWISE or (type(child) in _CHANNELWISE and not last[1].is_linear)
            last = last if apart and not _hooked(child) else None
    if not joints:
        return None
    return PaddedSequential(OrderedDict(module._modules), joints).train(module.training)
