"""Whether a stream fits into memory, said before it starts, with a size that would.

What a frame takes is found by running the model on tensors that have a shape and no memory, and adding up which of them
are alive at the same time.
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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from redline.errors import RedlineError
from redline.files.weights import check_safetensors_header
from redline.machine.host_memory import available_host_bytes, host_bytes
from redline.notation import format_bytes
from redline.stream.frame_model import FrameModel

# Work spaces of convolutions, rounding by the allocator, and the frames in the queues; on a CPU oneDNN brings what it
# reads into an order of its own as well (seen: 1.8 to 1.9 from 2048 × 2048 on), and kept memory is in pieces (2.7).
_MARGINS = {"cuda": 1.3, "cpu": 2.8}
# Of a side, from largest to smallest, that is tried for the sentence.
_EIGHTHS = range(7, 0, -1)


def check_fits(model: FrameModel, height: int, width: int) -> None:
    """Refuses a size for which there is too little memory, and says which one there is enough for."""
    needed, free = needed_bytes(model, height, width), free_bytes(model.device)
    if needed <= free:
        return
    said = (
        f"{model.name} needs about {format_bytes(needed)} for pictures of {width}×{height}, and {format_bytes(free)} "
        f"are free on {_where(model.device)}"
    )
    smaller = ((max(1, height * eighths // 8), max(1, width * eighths // 8)) for eighths in _EIGHTHS)
    fits = next((size for size in smaller if needed_bytes(model, *size) <= free), None)
    if fits is None:
        raise RedlineError(f"{said}: take a smaller model, or free some.")
    raise RedlineError(f"{said}: --size {fits[1]}x{fits[0]} would fit.")


def check_weights_fit(files: Iterable[Path], name: str, device: torch.device, in_both: bool = False) -> None:
    """Refuses weights for which there is too little memory before they are read; they pass through the host's, as fp32,
    and on the device they are in fp16 beside that for a while where it is looked whether that overflows."""
    whole = sum(path.stat().st_size + _grows_bytes(path) for path in files)
    for place in dict.fromkeys((torch.device("cpu"), device)):
        free, weights = free_bytes(place), whole * 3 // 2 if place == device and in_both else whole
        if weights > free:
            raise RedlineError(
                f"the weights of {name} take {format_bytes(weights)}, and {format_bytes(free)} are free on "
                f"{_where(place)}: a model of {100 * free // weights}% of its size would fit."
            )


def _grows_bytes(path: Path) -> int:
    """By how much halves become longer in fp32; none of a file that cannot be read, which its reader will say."""
    try:
        check_safetensors_header(path)
        with safe_open(path, "pt") as file:
            parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            return sum(2 * math.prod(part.get_shape()) for part in parts if part.get_dtype() in ("F16", "BF16"))
    except (OSError, SafetensorError):
        return 0


def needed_bytes(model: FrameModel, height: int, width: int) -> int:
    """The weights are there already, so they count as taken."""
    return int(_MARGINS[model.device.type] * model.working_bytes(model.padded_px(height), model.padded_px(width)))


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        try:
            return available_host_bytes()
        except OSError:
            # Where the kernel does not say what is free, only what could never fit is refused.
            return host_bytes()
    # What torch holds of the driver and does not use is free for us too.
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def _where(device: torch.device) -> str:
    return "this machine" if device.type == "cpu" else str(device)


def peak_live_bytes(run: Callable[[], Any]) -> int:
    """The most that tensors made by `run`, on the meta device, would hold at once."""
    with torch.inference_mode(), _LinearAttention(), _Live() as live:
        run()
    return live.peak


class _Live(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen and self._seen[key]() is not None:
            return

        def gone(_: object) -> None:
            self._now -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.ref(storage, gone)
        self._now += size
        self.peak = max(self.peak, self._now)


class _LinearAttention(TorchFunctionMode):
    """On the meta device attention is written out with its whole matrix, which no device does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, _, value = args[:3]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))
