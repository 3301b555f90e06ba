"""Measures memory per layer and in total: weights, activations, gradients, optimizer state, workspace and the peak.

One step runs with a ledger of all tensors, which splits the peak by layer and by kind. A second step without the ledger
reads the peak of the CUDA allocator; the part that exceeds the tensors is workspace (scratch buffers of libraries,
rounding). On a CPU the resident size of the process is reported instead.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from redline.ladder.gate import tensors_of
from redline.ladder.profile.ledger import Ledger, storage_parts
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import OPTIMIZER, OUTSIDE, Tracker, owner_paths
from redline.machine.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes


@dataclass(frozen=True)
class LayerMemory:
    """The bytes of one layer without its inner layers. `Memory.activations_are` says what counts as activations."""

    name: str
    type: str
    weight_bytes: int
    activation_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    # Bytes that are alive at the peak of the step.
    at_peak_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Memory:
    """The layers in the order of the model. Fields that are not available for the device or plan are None."""

    layers: tuple[LayerMemory, ...]
    activations_are: str
    weight_bytes: int
    activation_bytes: int | None
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    # The largest total size of all tensors at one time, and its parts by kind.
    counted_peak_bytes: int | None
    at_peak: Mapping[str, int]
    # From the CUDA allocator.
    peak_bytes: int | None = None
    workspace_bytes: int | None = None
    reserved_bytes: int | None = None
    fragmentation_bytes: int | None = None
    # From the operating system: the whole process, including Python and libraries.
    resident_bytes: int | None = None
    resident_peak_bytes: int | None = None

    def largest(self, count: int) -> tuple[LayerMemory, ...]:
        return tuple(sorted(self.layers, key=lambda layer: -layer.total_bytes)[:count])

    @property
    def totals(self) -> list[tuple[str, int]]:
        """The totals that are available for the device and the plan, with their names."""
        lines = [
            ("weights and buffers", self.weight_bytes),
            (f"activations ({self.activations_are})", self.activation_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("inputs", self.input_bytes),
            ("peak of all tensors", self.counted_peak_bytes),
            *((f"· {kind} at the peak", size) for kind, size in self.at_peak.items() if size),
            ("peak of the CUDA allocator", self.peak_bytes),
            ("workspace (allocator peak minus tensors)", self.workspace_bytes),
            ("reserved from the device", self.reserved_bytes),
            ("fragmentation (reserved, not allocated)", self.fragmentation_bytes),
            ("resident size of the process", self.resident_bytes),
            ("· peak in a step", self.resident_peak_bytes),
        ]
        return [(what, size) for what, size in lines if size is not None]


def measure_memory(subject: Subject) -> Memory:
    """Measures two steps: one with a ledger of all tensors, one without."""
    ledger = None if subject.sealed else _watched_step(subject)
    device = _device_bytes(subject)
    kept = _kept(subject)
    layers = _rows(subject, kept, ledger)
    totals = {kind: sum(sizes.values()) for kind, sizes in kept.items()}
    if ledger is not None and "peak_bytes" in device:
        device["workspace_bytes"] = max(device["peak_bytes"] - ledger.peak_bytes, 0)
    short_lived = "outputs of layers, most of them short-lived"
    return Memory(
        layers=layers,
        activations_are="saved for the backward pass" if subject.training else short_lived,
        weight_bytes=totals["weights"],
        activation_bytes=sum(layer.activation_bytes for layer in layers) if ledger is not None else None,
        gradient_bytes=totals["gradients"],
        optimizer_bytes=totals["optimizer"],
        input_bytes=_unique_bytes(tensors_of(subject.inputs)),
        counted_peak_bytes=ledger.peak_bytes if ledger is not None else None,
        at_peak=ledger.at_peak_by_kind if ledger is not None else {},
        **device,
    )


def _watched_step(subject: Subject) -> Ledger:
    tracker = Tracker(subject)
    ledger = Ledger(subject, tracker)
    if subject.optimizer is not None:
        subject.optimizer.zero_grad(set_to_none=True)  # as at the start of each step
    for tensor, layer, kind in _residents(subject):
        ledger.add(tensor, layer, kind)

    def pack(tensor: Tensor) -> Tensor:
        ledger.save(tensor, tracker.current.layer)
        return tensor

    def output(module: Any, _: Any, result: Any) -> None:
        name = names.get(id(module))
        if name is not None:
            for tensor in tensors_of(result):
                ledger.save(tensor, name)

    names = {id(module): name for name, module in subject.layers.items()}
    with tracker, ExitStack() as stack:
        if subject.training:
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        else:
            stack.callback(torch.nn.modules.module.register_module_forward_hook(output).remove)
        with ledger:
            subject.step()
    for parameter in subject.layers[""].parameters():
        if parameter.grad is not None:
            ledger.rename(parameter.grad, "gradients")
    ledger.close()
    return ledger


def _residents(subject: Subject) -> Iterable[tuple[Tensor, str, str]]:
    """Yields the tensors that exist before a step: weights, optimizer state and inputs."""
    for name, module in subject.layers.items():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            yield tensor, name, "weights"
    if subject.optimizer is not None:
        owners = owner_paths(subject.layers)
        for parameter, state in subject.optimizer.state.items():
            for tensor in tensors_of(state):
                yield tensor, owners.get(id(parameter), (OPTIMIZER,))[-1], "optimizer"
    for tensor in tensors_of(subject.inputs):
        yield tensor, OUTSIDE, "inputs"


def _kept(subject: Subject) -> dict[str, dict[str, int]]:
    """Returns the bytes that stay between steps, by kind and layer; shared storage counts for the first layer."""
    kept: dict[str, dict[str, int]] = {kind: defaultdict(int) for kind in ("weights", "gradients", "optimizer")}
    seen: set[int] = set()

    def add(kind: str, layer: str, tensor: Tensor) -> None:
        for part in storage_parts(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                kept[kind][layer] += storage.nbytes()

    for tensor, layer, kind in _residents(subject):
        if kind in kept:
            add(kind, layer, tensor)
    for name, module in subject.layers.items():
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                add("gradients", name, parameter.grad)
    return kept


def _rows(subject: Subject, kept: dict[str, dict[str, int]], ledger: Ledger | None) -> tuple[LayerMemory, ...]:
    at_peak = ledger.at_peak_by_layer if ledger is not None else {}
    saved = ledger.saved if ledger is not None else {}
    kinds = {name: type(module).__name__ for name, module in subject.layers.items()}
    others = sorted({*at_peak, *saved, *kept["optimizer"]} - set(kinds))
    rows = [
        LayerMemory(
            name=name,
            type=kinds.get(name, name),
            weight_bytes=kept["weights"].get(name, 0),
            activation_bytes=saved.get(name, 0),
            gradient_bytes=kept["gradients"].get(name, 0),
            optimizer_bytes=kept["optimizer"].get(name, 0),
            at_peak_bytes=at_peak.get(name, 0),
        )
        for name in [*kinds, *others]
    ]
    return tuple(row for row in rows if row.total_bytes or row.at_peak_bytes)


def _device_bytes(subject: Subject) -> dict[str, Any]:
    """Runs a step without a ledger, and returns the memory that the CUDA allocator or the operating system reports."""
    device = subject.device
    if device.type == "cuda":
        subject.wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        subject.step()
        subject.wait()
        reserved = torch.cuda.max_memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        return {"peak_bytes": peak, "reserved_bytes": reserved, "fragmentation_bytes": reserved - peak}
    resettable = reset_peak_resident()
    subject.step()
    return {"resident_bytes": resident_bytes(), "resident_peak_bytes": peak_resident_bytes() if resettable else None}


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for t in tensors for part in storage_parts(t)}
    return sum(storage.nbytes() for storage in storages.values())
