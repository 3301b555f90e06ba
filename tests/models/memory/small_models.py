"""Small Titans models of every kind, for the tests of this folder."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from redline.models.memory import TitanConfig, TitanModel

SMALL = TitanConfig(
    vocabulary=31,
    width=24,
    layers=2,
    heads=4,
    key_value_heads=2,
    attention_every=2,
    memory_heads=2,
    memory_chunk=16,
    segment=8,
    window_segments=1,
    memory_slots=6,
    merge_cosine=0.9,
)
KINDS = {
    "bank": SMALL,
    "adaptive bank": replace(SMALL, use_adaptive_compression=True, memory_compression_ratio=0.5),
    "window": replace(SMALL, memory_slots=0, attention_every=1),
    "neural": replace(SMALL, attention_every=0, convolution=1),
    "titans": replace(SMALL, attention_every=0, memory_update="titans", memory_chunk=5),
}


def built(config: TitanConfig, dtype: torch.dtype = torch.float64) -> TitanModel:
    model = TitanModel(config).to(dtype)
    for block in model.blocks:
        # A score that differs from token to token, so that the choice of what is kept matters.
        if getattr(block.mixer, "score", None) is not None:
            torch.nn.init.normal_(block.mixer.score.weight, std=2.0)
    return model


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(SMALL.vocabulary, (batch, length))


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))
