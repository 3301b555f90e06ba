"""Tests which arguments of the gated delta rule are refused."""

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.gated_delta_rule import gated_delta_rule


def inputs(tokens: int = 5) -> list[Tensor]:
    shapes = ((2, tokens, 3, 4), (2, tokens, 3, 4), (2, tokens, 3, 6), (2, tokens, 3), (2, tokens, 3))
    return [torch.rand(shape) for shape in shapes]


def test_invalid_shapes_are_refused() -> None:
    def refused(sentence: str, *tensors: Tensor | None, **options: object) -> None:
        with pytest.raises(ModelError, match=sentence):
            gated_delta_rule(*tensors, **options)

    q, k, v, g, beta = inputs()
    refused(r"k_BSHK must have shape \(2, 5, 3, 4\), not \(2, 5, 3, 3\)", q, k[..., :3], v, g, beta)
    refused(r"v_BSHV must have shape \(2, 5, 3, V\), not \(2, 4, 3, 6\)", q, k, v[:, :4], g, beta)
    refused("at least one token", *inputs(0))
    refused("g_BSH must have shape .2, 5, 3., not .2, 5, 2.", q, k, v, g[..., :2], beta)
    refused("state_BHKV must have shape .2, 3, 4, 6., not .2, 3, 6, 4.", q, k, v, g, beta, torch.zeros(2, 3, 6, 4))
    refused("documents_BS must have shape .2, 5.", q, k, v, g, beta, None, torch.zeros(2, 4, dtype=torch.int32))
    refused("documents_BS must be int32 or int64, not torch.float32", q, k, v, g, beta, None, torch.zeros(2, 5))
    refused("chunk must be at least 1, not 0", q, k, v, g, beta, chunk=0)
