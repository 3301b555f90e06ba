"""align: channel counts padded with zeros to a multiple of 8, so that tensor cores can be used.

Tensor cores multiply in tiles of 8 (16-bit numbers) channels; a layer with 53 of them falls back to slower
kernels or wastes part of a tile. Zero weights change no result: the input gets zero channels that meet zero
weights, and the output's extra channels are cut off again. The pad and the cut cost copies, so inside an
`nn.Sequential`, where only channel-wise modules stand between two padded layers, the padded tensor is handed
on as it is.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

# What works on each number alone: extra channels stay apart, and meet only zero weights in the next layer.
_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Dropout,
)  # fmt: skip
# What works on each channel alone, which is enough between convolutions.
_CHANNELWISE = (
    nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample, nn.Dropout2d,
    nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
)  # fmt: skip


def _ceil(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _widths(layer: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Input and output channels (or features)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


class Padded(nn.Module):
    """A Conv2d or Linear with wider weights, seen from outside as it was."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, multiple: int) -> None:
        super().__init__()
        self.inputs, self.outputs = _widths(layer)
        self.is_linear = isinstance(layer, nn.Linear)
        self.extra_inputs = _ceil(self.inputs, multiple) - self.inputs
        self.extra_outputs = _ceil(self.outputs, multiple) - self.outputs
        self.added = -layer.weight.numel()
        self.layer = self._widen(layer)
        self.added += self.layer.weight.numel()
        self.train(layer.training)

    def _widen(self, layer: nn.Conv2d | nn.Linear) -> nn.Conv2d | nn.Linear:
        """The layer itself, with zeros around its weights (the job owns it)."""
        sides = (0, self.extra_inputs, 0, self.extra_outputs)
        wider = F.pad(layer.weight.detach(), sides if self.is_linear else (0, 0, 0, 0, *sides))
        layer.weight = nn.Parameter(wider, layer.weight.requires_grad)
        if layer.bias is not None:
            bias = F.pad(layer.bias.detach(), (0, self.extra_outputs))
            layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
        names = ("in_features", "out_features") if self.is_linear else ("in_channels", "out_channels")
        for name, extra in zip(names, (self.extra_inputs, self.extra_outputs), strict=True):
            setattr(layer, name, getattr(layer, name) + extra)
        return layer

    @property
    def weight(self) -> Tensor:
        """The weight as it was, for code that reads it past the layer's forward."""
        return self.layer.weight[: self.outputs, : self.inputs]

    @property
    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.layer.bias[: self.outputs]

    def forward(self, x: Tensor, arrives_padded: bool = False, leaves_padded: bool = False) -> Tensor:
        if self.extra_inputs and not arrives_padded:
            x = F.pad(x, (0, self.extra_inputs) if self.is_linear else (0, 0, 0, 0, 0, self.extra_inputs))
        x = self.layer(x)
        if self.extra_outputs and not leaves_padded:
            # Channels are third from the end, with or without a batch; a clone, so that `.view` still works.
            x = x.narrow(-1 if self.is_linear else -3, 0, self.outputs).clone()
        return x

    def extra_repr(self) -> str:
        return f"{self.inputs}+{self.extra_inputs} -> {self.outputs}+{self.extra_outputs}"


class PaddedSequential(nn.Sequential):
    """A Sequential that hands padded tensors on where it may; a child called alone still works as before."""

    def __init__(self, children: "OrderedDict[str, nn.Module]", joints: set[int]) -> None:
        super().__init__(children)
        # The index of each child that leaves its output padded, for the next Padded to take.
        self.joints = frozenset(joints)

    def forward(self, input: Tensor) -> Tensor:
        padded = False
        for index, child in enumerate(self):
            if isinstance(child, Padded):
                leaves_padded = index in self.joints
                input = child(input, padded, leaves_padded)
                padded = leaves_padded
            else:
                input = child(input)
        return input


@dataclass(frozen=True)
class Align(Rung):
    name: ClassVar[str] = "align"
    stage: ClassVar[Stage] = Stage.LAYOUT
    summary: ClassVar[str] = "channel counts padded with zeros to a multiple of 8, for tensor cores"
    training: ClassVar[bool] = False

    multiple: int = option(8, "what channel counts become a multiple of")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiple < 2:
            raise RungError(f"align: multiple is a whole number of 2 or more, not {self.multiple}.")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if "tensor cores" not in machine.features:
            return f"{machine.name} has no tensor cores for the padding to help"
        if job is not None and not find_unaligned(job.model, self.multiple):
            return f"no plain Conv2d or Linear has a channel count that is no multiple of {self.multiple}"
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
            f"{len(padded)} layers padded to multiples of {self.multiple}: {added:,} multiply-adds more per "
            f"output position (+{added / (now - added):.1%} in those layers), {joints} cut-and-pad saved"
        )


def find_unaligned(model: nn.Module, multiple: int) -> list[nn.Conv2d | nn.Linear]:
    """The plain layers that padding would change; not subclasses, grouped, quantized or hooked ones."""
    found = []
    for module in model.modules():
        if isinstance(module, Padded):
            continue
        # Exact types: a subclass may use its weight in ways of its own.
        if type(module) not in (nn.Conv2d, nn.Linear) or getattr(module, "groups", 1) != 1:
            continue
        assert isinstance(module, (nn.Conv2d, nn.Linear))
        plain = type(module.weight) is nn.Parameter and module.weight.is_floating_point()
        hooked = module._forward_pre_hooks or module._forward_hooks
        if plain and not hooked and any(width % multiple for width in _widths(module)):
            found.append(module)
    return found


def _swap(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Puts every new module in each place where its old one stands; a module used twice stays one module."""
    for parent in [*model.modules(), *new.values()]:
        if isinstance(parent, Padded):
            continue
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def _join(module: nn.Module) -> PaddedSequential | None:
    """The same Sequential with its joints, if it has any."""
    if type(module) is not nn.Sequential or module._forward_pre_hooks or module._forward_hooks:
        return None
    joints: set[int] = set()
    last: tuple[int, Padded] | None = None
    for index, child in enumerate(module):
        if isinstance(child, Padded):
            if last is not None and _fits(last[1], child):
                joints.add(last[0])
            last = (index, child) if child.extra_outputs else None
        elif last is not None and not _hands_on(child, last[1]):
            last = None
    if not joints:
        return None
    joined = PaddedSequential(OrderedDict(module._modules), joints)
    return joined.train(module.training)


def _fits(before: Padded, after: Padded) -> bool:
    return before.is_linear == after.is_linear and before.outputs == after.inputs


def _hands_on(module: nn.Module, before: Padded) -> bool:
    if module._forward_pre_hooks or module._forward_hooks:
        return False
    return type(module) in _ELEMENTWISE or (not before.is_linear and type(module) in _CHANNELWISE)
