"""Records every storage of a step: its layer, its kind, its allocation and its release.

A dispatch mode sees the results of all operators of the forward and the backward pass, and weak references report when
a storage is freed. From these events the ledger computes the peak and the storages that are alive at the peak.
"""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from redline.ladder.gate import tensors_of
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import FORWARD, OPTIMIZER, Tracker

# The kinds of memory at the peak.
KINDS = ("weights", "activations", "gradients", "optimizer", "inputs", "temporary")


@dataclass
class Block:
    """One storage: its size, layer and kind."""

    size: int
    layer: str
    kind: str


class Ledger(TorchDispatchMode):
    """Records the allocation and release of each storage."""

    def __init__(self, subject: Subject, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._device = subject.device
        self._blocks: dict[int, Block] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[Block, int]] = []
        # By layer: bytes that autograd saves for the backward pass or, for inference, that layers return.
        self.saved: dict[str, int] = defaultdict(int)
        self._saved_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self._tracker.current
        kind = "activations" if place.phase == FORWARD and place.layer != OPTIMIZER else "temporary"
        for tensor in tensors_of(result):
            self.add(tensor, place.layer, kind)
        return result

    def add(self, tensor: Tensor, layer: str, kind: str) -> None:
        for part in storage_parts(tensor):
            if part.device.type != self._device.type:
                continue
            storage = part.untyped_storage()
            key = storage._cdata
            if key in self._blocks:
                continue
            block = Block(storage.nbytes(), layer, kind)
            self._blocks[key] = block
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._released(key))
            self._events.append((block, block.size))

    def _released(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        self._references.pop(key, None)
        self._saved_storages.discard(key)  # a new storage may get the same address
        if block is not None:
            self._events.append((block, -block.size))

    def rename(self, tensor: Tensor, kind: str) -> None:
        """Changes the kind of a tensor: a gradient can be identified only when it is attached to its parameter."""
        for part in storage_parts(tensor):
            block = self._blocks.get(part.untyped_storage()._cdata)
            if block is not None:
                block.kind = kind

    def save(self, tensor: Tensor, layer: str) -> None:
        """Counts an activation for the first layer that saves it; ignores weights."""
        for part in storage_parts(tensor):
            key = part.untyped_storage()._cdata
            block = self._blocks.get(key)
            if block is None or block.kind != "activations" or key in self._saved_storages:
                continue
            self._saved_storages.add(key)
            self.saved[layer] += block.size

    def close(self) -> None:
        """Stops recording, and computes the peak and the bytes at the peak by kind and by layer."""
        self._references.clear()
        self._blocks.clear()
        now = peak_events = self.peak_bytes = 0
        for count, (_, change) in enumerate(self._events, start=1):
            now += change
            if now > self.peak_bytes:
                self.peak_bytes, peak_events = now, count
        self.at_peak_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.at_peak_by_layer: dict[str, int] = defaultdict(int)
        for block, change in self._events[:peak_events]:
            self.at_peak_by_kind[block.kind] += change
            self.at_peak_by_layer[block.layer] += change


def storage_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that own storage; a quantized tensor wraps several of them."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in storage_parts(getattr(tensor, name))]
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return []
    return [tensor]
