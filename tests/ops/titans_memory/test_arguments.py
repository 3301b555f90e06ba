"""Arguments of the Titans memory that are refused."""

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.titans_memory import TitansState, titans_memory


def inputs(tokens: int = 5) -> list[Tensor]:
    shapes = ((2, tokens, 3, 4), (2, tokens, 3, 4), (2, tokens, 3, 6), *[(2, tokens, 3)] * 3)
    return [torch.rand(shape) for shape in shapes]


def test_shapes_that_do_not_fit_are_refused() -> None:
    def refused(sentence: str, *tensors: Tensor | None, **options: object) -> None:
        with pytest.raises(ModelError, match=sentence):
            titans_memory(*tensors, **options)

    q, k, v, *gates = inputs()
    refused(r"q and k \(B, S, H, K\)", q, k[..., :3], v, *gates)
    refused("not .2, 5, 3, 4., .2, 5, 3, 4. and .2, 4, 3, 6.", q, k, v[:, :4], *gates)
    refused("at least one token", *inputs(0))
    refused("alpha, eta and theta of .2, 5, 3. here", q, k, v, gates[0], gates[1], gates[2][..., :2])
    refused(
        "is three times .2, 3, 4, 6. and .2,. here", q, k, v, *gates, TitansState(*torch.zeros(3, 2, 3, 6, 4), gates[0])
    )
    refused("document numbers are .2, 5. here", q, k, v, *gates, None, torch.zeros(2, 4, dtype=torch.int32))
    refused("whole numbers, not torch.float32", q, k, v, *gates, None, torch.zeros(2, 5))
    refused("at least 1 token, not 0", q, k, v, *gates, chunk=0)
