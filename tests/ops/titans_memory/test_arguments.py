"""Tests which arguments of the Titans memory are refused."""

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.titans_memory import TitansState, titans_memory


def inputs(tokens: int = 5) -> list[Tensor]:
    shapes = ((2, tokens, 3, 4), (2, tokens, 3, 4), (2, tokens, 3, 6), *[(2, tokens, 3)] * 3)
    return [torch.rand(shape) for shape in shapes]


def test_invalid_shapes_are_refused() -> None:
    def refused(sentence: str, *tensors: Tensor | None, **options: object) -> None:
        with pytest.raises(ModelError, match=sentence):
            titans_memory(*tensors, **options)

    q, k, v, *gates = inputs()
    refused(r"k_BSHK must have shape \(2, 5, 3, 4\), not \(2, 5, 3, 3\)", q, k[..., :3], v, *gates)
    refused(r"v_BSHV must have shape \(2, 5, 3, V\), not \(2, 4, 3, 6\)", q, k, v[:, :4], *gates)
    refused("at least one token", *inputs(0))
    refused("theta_BSH must have shape .2, 5, 3., not .2, 5, 2.", q, k, v, gates[0], gates[1], gates[2][..., :2])
    refused(
        "state.memory_BHKV must have shape .2, 3, 4, 6., not .2, 3, 6, 4.",
        q,
        k,
        v,
        *gates,
        TitansState(*torch.zeros(3, 2, 3, 6, 4), gates[0]),
    )
    refused("documents_BS must have shape .2, 5.", q, k, v, *gates, None, torch.zeros(2, 4, dtype=torch.int32))
    refused("documents_BS must be int32 or int64, not torch.float32", q, k, v, *gates, None, torch.zeros(2, 5))
    refused("chunk must be at least 1, not 0", q, k, v, *gates, chunk=0)
