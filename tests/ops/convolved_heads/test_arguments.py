"""Tests which arguments of convolved heads are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.convolved_heads import convolved_heads

X, TAPS, RECENT = torch.randn(2, 5, 24), torch.randn(4, 24), torch.randn(2, 3, 24)


def test_invalid_arguments_are_refused() -> None:
    def refused(sentence: str, *arguments: object) -> None:
        with pytest.raises(ModelError, match=sentence):
            convolved_heads(*arguments)

    refused(r"recent_BTC must have shape \(2, 3, 24\), not \(2, 2, 24\)", X, TAPS, RECENT[:, 1:], 2, 4)
    refused(r"taps_TC must have shape \(T, 24\), not \(4, 23\)", X, TAPS[:, 1:], RECENT, 2, 4)
    refused("24 channels cannot be split into 2 heads with queries and keys of 6", X, TAPS, RECENT, 2, 6)
    refused("24 channels cannot be split into 5 heads with queries and keys of 2", X, TAPS, RECENT, 5, 2)
    refused("x_BSC must be floating-point", X.int(), TAPS, RECENT, 2, 4)
    refused(
        r"documents_BS must have shape \(2, 5\), not \(2, 4\)",
        X,
        TAPS,
        RECENT,
        2,
        4,
        torch.zeros(2, 4, dtype=torch.int64),
    )
    refused("documents_BS must be int32 or int64", X, TAPS, RECENT, 2, 4, torch.zeros(2, 5))
    refused("taps_TC is on meta, but x_BSC is on cpu", X, TAPS.to("meta"), RECENT, 2, 4)
