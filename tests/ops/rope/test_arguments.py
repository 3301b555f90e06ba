"""Arguments of rope that are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.rope import rope, rope_tables

Q, K = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8)
COS, SIN = rope_tables(6, 8)


def test_what_does_not_fit_is_refused() -> None:
    def refused(sentence: str, *arguments: torch.Tensor | None) -> None:
        with pytest.raises(ModelError, match=sentence):
            rope(*arguments)

    refused(r"not \(2, 5, 4, 8\) and \(2, 4, 1, 8\)", Q, K[:, 1:], COS, SIN)
    refused("batch, tokens, heads, even channels", Q[..., :7], K[..., :7], COS, SIN)
    refused("batch, tokens, heads, even channels", Q[0], K[0], COS, SIN)
    refused("of one floating dtype", Q, K.half(), COS, SIN)
    refused(r"4 columns for heads of 8 channels, not \(6, 3\) and \(6, 4\)", Q, K, COS[:, :3], SIN)
    refused("tables end at 4 tokens, and the text has 5", Q, K, COS[:4], SIN[:4])
    refused("a whole number for each of 2 × 5 tokens", Q, K, COS, SIN, torch.zeros(5, dtype=torch.int64))
    refused("a whole number for each of 2 × 5 tokens", Q, K, COS, SIN, torch.zeros(2, 5))
    refused("inputs are on cpu and on meta", Q, K, COS, SIN.to("meta"))
    refused("they get no gradient", Q, K, COS.clone().requires_grad_(), SIN)
