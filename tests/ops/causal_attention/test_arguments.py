"""Tests which arguments of causal attention are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.causal_attention import Far, causal_attention

Q, K, LOWEST = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, dtype=torch.int32)


def test_invalid_arguments_are_refused() -> None:
    def refused(sentence: str, *arguments: torch.Tensor) -> None:
        with pytest.raises(ModelError, match=sentence):
            causal_attention(*arguments)

    refused(r"k_TGD must have shape \(5, G, 16\), not \(4, 2, 16\)", Q, K[1:], K, LOWEST)
    refused(r"v_TGD must have shape \(5, 2, 16\), not \(4, 2, 16\)", Q, K, K[1:], LOWEST)
    refused(r"q_THD must have shape \(T, H, D\), not \(1, 5, 4, 16\)", Q[None], K[None], K[None], LOWEST)
    refused("the 4 query heads must be a multiple of the 3", Q, *(torch.randn(5, 3, 16),) * 2, LOWEST)
    refused("at least one token", Q[:0], K[:0], K[:0], LOWEST[:0])
    refused("k_TGD is torch.float16, but q_THD is torch.float32", Q, K.half(), K, LOWEST)
    refused("q_THD must be floating-point, not torch.int32", Q.int(), K.int(), K.int(), LOWEST)
    refused(r"lowest_T must have shape \(5,\), not \(4,\)", Q, K, K, LOWEST[1:])
    refused("lowest_T must be int32 or int64, not torch.float32", Q, K, K, LOWEST.float())
    refused("lowest_T is on meta, but q_THD is on cpu", Q, K, K, LOWEST.to("meta"))


def test_invalid_far_arguments_are_refused() -> None:
    bias = torch.zeros(5)
    for sentence, far in {
        r"far.q_THD must have shape \(5, 4, 16\), not \(4, 4, 16\)": Far(Q[1:], K, bias, LOWEST),
        "far.k_TGD is torch.float16, but q_THD is torch.float32": Far(Q, K.half(), bias, LOWEST),
        r"far.bias_T must have shape \(5,\)": Far(Q, K, bias[1:], LOWEST),
        "far.bias_T must be floating-point": Far(Q, K, LOWEST, LOWEST),
        "far.first_T must be int32 or int64": Far(Q, K, bias, bias),
        "far.bias_T is on meta, but q_THD is on cpu": Far(Q, K, bias.to("meta"), LOWEST),
    }.items():
        with pytest.raises(ModelError, match=sentence):
            causal_attention(Q, K, K, LOWEST, far=far)
