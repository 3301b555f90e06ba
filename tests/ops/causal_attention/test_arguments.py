"""Arguments of causal attention that are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.causal_attention import Far, causal_attention

Q, K, LOWEST = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, dtype=torch.int32)


def test_what_does_not_fit_is_refused() -> None:
    def refused(sentence: str, *arguments: torch.Tensor) -> None:
        with pytest.raises(ModelError, match=sentence):
            causal_attention(*arguments)

    refused(r"not \(5, 4, 16\), \(4, 2, 16\) and \(5, 2, 16\)", Q, K[1:], K, LOWEST)
    refused("tokens, heads, channels", Q[None], K[None], K[None], LOWEST)
    refused("4 heads cannot share 3 keys and values", Q, *(torch.randn(5, 3, 16),) * 2, LOWEST)
    refused("over 0 tokens", Q[:0], K[:0], K[:0], LOWEST[:0])
    refused("one floating dtype, not torch.float32, torch.float16", Q, K.half(), K, LOWEST)
    refused("one floating dtype", Q.int(), K.int(), K.int(), LOWEST)
    refused("a whole number for each of 5 tokens", Q, K, K, LOWEST[1:])
    refused("a whole number for each of 5 tokens", Q, K, K, LOWEST.float())
    refused("inputs are on cpu and on meta", Q, K, K, LOWEST.to("meta"))


def test_what_does_not_fit_far_away_is_refused() -> None:
    bias = torch.zeros(5)
    for sentence, far in {
        r"not by \(4, 4, 16\) in torch.float32 for \(5, 4, 16\)": Far(Q[1:], K, bias, LOWEST),
        r"not by \(5, 2, 16\) in torch.float16 for \(5, 2, 16\) in torch.float32": Far(Q, K.half(), bias, LOWEST),
        "a bias for each of 5 tokens": Far(Q, K, bias[1:], LOWEST),
        "a bias for each of 5 tokens, ": Far(Q, K, LOWEST, LOWEST),
        "a whole number for each of 5 tokens": Far(Q, K, bias, bias),
        "inputs are on cpu and on meta": Far(Q, K, bias.to("meta"), LOWEST),
    }.items():
        with pytest.raises(ModelError, match=sentence):
            causal_attention(Q, K, K, LOWEST, far=far)
