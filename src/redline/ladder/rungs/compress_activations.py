"""compress_activations: stores the activations saved for the backward pass in fewer bits.

The forward pass is unchanged. Hooks on saved tensors pack the activations, and the backward pass unpacks them. Unlike
`checkpoint`, nothing is computed twice, but the gradients are computed from rounded activations; the gates check them.

Weights and buffers are never packed: they stay in memory anyway, so a packed copy would need additional memory. An
activation that several operations save, such as the input of query, key and value, is packed once and shared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from redline.errors import Refused
from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.notation import format_bytes

_FORMATS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# int8 has one scale per group of this many elements, so that an outlier affects only its group.
_GROUP = 256
# The largest code of each format encodes infinity, because attention masks contain it. The next smaller code encodes
# the largest finite value.
_INFINITY = {"fp8": 448.0, "int8": 127.0}
_LARGEST = {"fp8": 416.0, "int8": 126.0}


@dataclass
class Packed:
    """The packed elements in storage order and the scale to unpack them (None for bf16)."""

    values: Tensor
    scale: Tensor | None
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, flat: Tensor, form: str) -> "Packed":
        if form == "bf16":
            return cls(flat.to(torch.bfloat16), None, flat.numel(), flat.dtype)
        # fp8 has an exponent, so one scale for the whole tensor is sufficient.
        wide = flat.float().view(1, -1)
        if form == "int8":
            wide = nn.functional.pad(wide, (0, -flat.numel() % _GROUP)).view(-1, _GROUP)
        # Excludes infinities from the scale without synchronizing with the device. A NaN makes its whole group NaN.
        largest = wide.abs().masked_fill_(wide.isinf(), 0.0).amax(1, keepdim=True)
        scale = (largest / _LARGEST[form]).clamp_min(torch.finfo(torch.float32).tiny)
        steps = (wide / scale).clamp_(-_INFINITY[form], _INFINITY[form])
        values = (steps.round_() if form == "int8" else steps).to(_FORMATS[form])
        return cls(values, scale, flat.numel(), flat.dtype)

    def flat(self) -> Tensor:
        if self.scale is None:
            return self.values.to(self.dtype)
        steps = self.values.float()
        infinity = _INFINITY["int8" if self.values.dtype is torch.int8 else "fp8"]
        wide = torch.where(steps.abs() == infinity, steps * torch.inf, steps * self.scale)
        return wide.view(-1)[: self.count].to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


# A saved tensor, described as a view of the packed elements by its shape and stride.
_View = tuple[Packed, torch.Size, tuple[int, ...]]


@dataclass
class Compression:
    """Packs the tensors that one step saves; the counts are those of the last step."""

    model: nn.Module
    form: str
    min_bytes: int
    tensors: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    # The largest tensor that was not packed because it is below `min_bytes`.
    largest_small_bytes: int = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        if not torch.is_grad_enabled():  # an evaluation between training steps saves no activations
            yield
            return
        self.tensors = self.bytes_before = self.bytes_after = self.largest_small_bytes = 0
        # Weak references, so that packed activations are freed together with the autograd graph.
        self._seen: WeakValueDictionary[Any, Packed] = WeakValueDictionary()
        # Collected at every step, because other rungs move and convert the weights.
        kept = (*self.model.parameters(), *self.model.buffers())
        self._weights = {t.untyped_storage()._cdata for t in kept if type(t) in (Tensor, nn.Parameter)}
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _fits(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.is_floating_point() and tensor.layout is torch.strided
        if not plain or tensor.dtype.itemsize <= _FORMATS[self.form].itemsize:
            return False
        storage = tensor.untyped_storage()
        # Packing would enlarge an expanded tensor, and a trainable leaf stays in memory anyway.
        expanded = tensor.nbytes > storage.nbytes()
        owned = storage._cdata in self._weights or (tensor.is_leaf and tensor.requires_grad)
        if expanded or owned:
            return False
        if tensor.nbytes < self.min_bytes:
            self.largest_small_bytes = max(self.largest_small_bytes, tensor.nbytes)
            return False
        return True

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if not self._fits(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        with torch.no_grad():
            plain = tensor.detach()
            key = (storage, plain.dtype, tensor._version)
            if _covers_its_storage(plain):
                # All views of the whole storage (flattened, transposed, channels-last) share one packed copy.
                flat, stride = plain.as_strided((plain.numel(),), (1,)), plain.stride()
            else:
                key = (*key, plain.storage_offset(), plain.shape, plain.stride())
                whole = plain.contiguous()
                flat, stride = whole.view(-1), whole.stride()
            packed = self._seen.get(key)
            if packed is None:
                packed = self._seen[key] = Packed.of(flat, self.form)
                self.tensors += 1
                self.bytes_before += flat.nbytes
                self.bytes_after += packed.nbytes
        return packed, tensor.shape, stride

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        packed, shape, stride = saved
        return packed.flat().as_strided(shape, stride)


def _covers_its_storage(tensor: Tensor) -> bool:
    """Returns whether the tensor contains every element of its storage once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return expected * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class CompressActivations(Rung):
    name = "compress_activations"
    stage = Stage.MEMORY
    summary = "activations saved for the backward pass in bf16, fp8 or int8"
    inference = False
    # Inside a checkpoint, the saved-tensor hooks of the checkpoint replace those of this rung, so this rung would not
    # pack the activations there.
    excludes = frozenset({"checkpoint"})

    format: str = option("bf16", "format of saved activations", tuple(_FORMATS))
    min_bytes: int = option(65536, "minimum size in bytes of a packed tensor", at_least=0)

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return (cls("bf16"), cls("int8"))

    def apply(self, job: Job) -> Job:
        compression = Compression(job.model, self.format, self.min_bytes)
        return replace(job, contexts=(*job.contexts, compression.step)).with_evidence(self.name, compression)

    def proof(self, job: Job) -> str:
        seen: Compression = job.evidence[self.name]
        if not seen.tensors and seen.largest_small_bytes:
            largest = format_bytes(seen.largest_small_bytes)
            small = f"every saved activation is smaller than min_bytes={self.min_bytes}"
            raise Refused(f"{self.name}: {small} (the largest has {largest}).")
        if seen.bytes_after >= seen.bytes_before:
            return ""
        sizes = f"{format_bytes(seen.bytes_before)} reduced to {format_bytes(seen.bytes_after)}"
        return f"{seen.tensors} saved activations packed as {self.format} in the last step: {sizes}"
