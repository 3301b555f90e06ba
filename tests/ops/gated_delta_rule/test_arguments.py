"""Arguments of the gated delta rule that are refused."""

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.ops.gated_delta_rule import gated_delta_rule


def inputs(tokens: int = 5) -> list[Tensor]:
    shapes = ((2, tokens, 3, 4), (2, tokens, 3, 4), (2, tokens, 3, 6), (2, tokens, 3), (2, tokens, 3))
    return [torch.rand(shape) for shape in shapes]


def test_shapes_that_do_not_fit_are_refused() -> None:
    def refused(sentence: str, *tensors: Tensor | None, **options: object) -> None:
        with pytest.raises(ModelError, match=sentence):
            gated_delta_rule(*tensors, **options)

    q, k, v, g, beta = inputs()
    refused(r"q and k \(B, S, H, K\)", q, k[..., :3], v, g, beta)
    refused("not .2, 5, 3, 4., .2, 5, 3, 4. and .2, 4, 3, 6.", q, k, v[:, :4], g, beta)
    refused("at least one token", *inputs(0))
    refused("g and beta of .2, 5, 3. here", q, k, v, g[..., :2], beta)
    refused("a state .* is .2, 3, 4, 6. here, not .2, 3, 6, 4.", q, k, v, g, beta, torch.zeros(2, 3, 6, 4))
    refused("document numbers are .2, 5. here", q, k, v, g, beta, None, torch.zeros(2, 4, dtype=torch.int32))
    refused("whole numbers, not torch.float32", q, k, v, g, beta, None, torch.zeros(2, 5))
    refused("at least 1 token, not 0", q, k, v, g, beta, chunk=0)
