"""Tests which arguments of rope are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.rope import rope, rope_tables

Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8)
COS, SIN = rope_tables(6, 8)


def test_invalid_arguments_are_refused() -> None:
    def refused(sentence: str, *arguments: torch.Tensor | None) -> None:
        with pytest.raises(ModelError, match=sentence):
            rope(*arguments)

    refused(r"not \(2, 5, 4, 8\) and \(2, 4, 1, 8\)", Q, K[:, 1:], COS, SIN)
    refused("even head_dim", Q[..., :7], K[..., :7], COS, SIN)
    refused("batch, tokens, heads, head_dim", Q[0], K[0], COS, SIN)
    refused("k_BSHD is torch.float16, but q_BSHD is torch.float32", Q, K.half(), COS, SIN)
    refused(r"cos_SD must be \(positions, 4\), not \(6, 3\)", Q, K, COS[:, :3], SIN)
    refused("the sequence has 5 tokens, but cos_SD has 4 positions", Q, K, COS[:4], SIN[:4])
    refused(r"positions_BS must have shape \(2, 5\), not \(5,\)", Q, K, COS, SIN, torch.zeros(5, dtype=torch.int64))
    refused("positions_BS must be int32 or int64", Q, K, COS, SIN, torch.zeros(2, 5))
    refused("sin_SD is on meta, but q_BSHD is on cpu", Q, K, COS, SIN.to("meta"))
    refused("must not require grad", Q, K, COS.clone().requires_grad_(), SIN)
