"""Checks before a stream starts whether it fits in memory, and suggests a frame size that does.

The memory of a frame is estimated by running the model on the meta device, where tensors have no storage, and adding up
the sizes of the tensors that are alive at the same time.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from redline.errors import RedlineError
from redline.files.weights import check_safetensors_header
from redline.machine.host_memory import available_host_bytes, host_bytes
from redline.machine.trees import tree_leaves
from redline.notation import format_bytes
from redline.stream.frame_model import FrameModel

# The estimate is multiplied by these factors for convolution workspaces, rounding by the allocator, and queued frames.
# On a CPU, oneDNN also copies its inputs to its own layouts (measured factor: 1.8 to 1.9 from 2048 × 2048 on), and
# fragmentation adds to that (measured: 2.7).
_MARGINS = {"cuda": 1.3, "cpu": 2.8}
# The frame sizes to try for the suggestion: this many eighths of the requested height and width, largest first.
_EIGHTHS = range(7, 0, -1)


def _free_text(free: int, device: torch.device) -> str:
    return f"{format_bytes(free)} are free on {'this machine' if device.type == 'cpu' else device}"


def check_fits(model: FrameModel, height: int, width: int) -> None:
    """Raises RedlineError with a suggestion if there is too little memory for frames of this size."""
    needed, free = needed_bytes(model, height, width), free_bytes(model.device)
    if needed <= free:
        return
    needs = f"{model.name} needs about {format_bytes(needed)} for frames of {width}×{height}"
    text = f"{needs}, and {_free_text(free, model.device)}"
    smaller = ((max(1, height * eighths // 8), max(1, width * eighths // 8)) for eighths in _EIGHTHS)
    fits = next((size for size in smaller if needed_bytes(model, *size) <= free), None)
    if fits is None:
        raise RedlineError(f"{text}: use a smaller model, or free memory.")
    raise RedlineError(f"{text}: --size {fits[1]}x{fits[0]} would fit.")


def check_weights_fit(files: Iterable[Path], name: str, device: torch.device, keeps_copy: bool = False) -> None:
    """Raises RedlineError if there is too little memory to load the weights: as fp32 on the host, then on the device.

    If `keeps_copy`, the device also holds an fp16 copy of the weights while fp16 is checked for overflows.
    """
    total = sum(path.stat().st_size + _fp32_growth_bytes(path) for path in files)
    for place in dict.fromkeys((torch.device("cpu"), device)):
        free, weights = free_bytes(place), total * 3 // 2 if place == device and keeps_copy else total
        if weights > free:
            take = f"the weights of {name} take {format_bytes(weights)}, and {_free_text(free, place)}"
            raise RedlineError(f"{take}: a model of {100 * free // weights}% of this size would fit.")


def _fp32_growth_bytes(path: Path) -> int:
    """Returns how many bytes 16-bit weights grow by in fp32; 0 for an unreadable file: loading reports the error."""
    try:
        check_safetensors_header(path)
        with safe_open(path, "pt") as file:
            parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            return sum(2 * math.prod(part.get_shape()) for part in parts if part.get_dtype() in ("F16", "BF16"))
    except (OSError, SafetensorError):
        return 0


def needed_bytes(model: FrameModel, height: int, width: int) -> int:
    """Estimates the memory that frames of this size take, without the weights, which are loaded already."""
    return int(_MARGINS[model.device.type] * model.working_bytes(model.padded_px(height), model.padded_px(width)))


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        try:
            return available_host_bytes()
        except OSError:
            # The free memory is unknown: assumes that all memory is free.
            return host_bytes()
    # Memory that torch has reserved but does not use is available too.
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def peak_live_bytes(run: Callable[[], Any]) -> int:
    """Returns the peak total size of the tensors that `run` creates on the meta device."""
    with torch.inference_mode(), _FlashAttention(), _LiveTensors() as live:
        run()
    return live.peak


class _LiveTensors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages and self._storages[key]() is not None:
            return

        def free(_: object) -> None:
            self._live -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, free)
        self._live += size
        self.peak = max(self.peak, self._live)


class _FlashAttention(TorchFunctionMode):
    """Replaces scaled dot-product attention with an empty output, so that no attention matrix is counted.

    PyTorch would allocate this matrix on the meta device, although the fused kernels of CPU and GPU do not need it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, _, value = args[:3]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))
