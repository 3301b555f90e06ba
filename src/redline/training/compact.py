"""Compact checkpoints: 10 bytes per parameter instead of 16, for training states that are transferred.

Weights stay fp32. The optimizer's moments are stored in bf16. Averaged weights are stored in bf16 as their difference
from the weights: the difference is small, so its rounding error is far below that of an average in 16 bits. Training
continues in fp32, so that rounding happens once per transfer and not in every step.
"""

from typing import Any

import torch
from torch import Tensor

_KEY = "compact"


def compacted(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's content in its compact form."""
    if content.get(_KEY):
        return content
    model, ema = content["model"], content["ema"]
    difference = ema and {name: _halved(tensor - model[name]) for name, tensor in ema.items()}
    return {**content, "ema": difference, "optimizer": _converted(content["optimizer"], _halved), _KEY: True}


def expanded(content: dict[str, Any]) -> dict[str, Any]:
    """Undoes `compacted`, up to rounding. Returns content that is not compact unchanged."""
    if not content.get(_KEY):
        return content
    model, difference = content["model"], content["ema"]
    ema = difference and {name: model[name] + tensor.to(model[name].dtype) for name, tensor in difference.items()}
    return {**content, "ema": ema, "optimizer": _converted(content["optimizer"], _restored), _KEY: False}


def _converted(value: Any, convert: Any) -> Any:
    """Converts every tensor of nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _converted(inner, convert) for key, inner in value.items()}
    if isinstance(value, list):
        return [_converted(inner, convert) for inner in value]
    return convert(value) if isinstance(value, Tensor) else value


def _halved(tensor: Tensor) -> Tensor:
    # Scalars, such as step counts, keep their dtype.
    return tensor.bfloat16() if tensor.dtype == torch.float32 and tensor.ndim else tensor


def _restored(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
