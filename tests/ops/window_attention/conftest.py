"""The comparison of window attention with its reference in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.ops.window_attention import reference


@pytest.fixture
def agrees(agrees: Callable[..., None]) -> Callable[..., None]:
    """Compares an implementation's output and gradients with the reference.

    Queries, keys and biases are large enough for attention to be uneven, so that every bias and every mask counts.
    """

    def check(
        implementation: Callable[[Tensor, Tensor, int, int], Tensor],
        shape_BHWC: tuple[int, int, int, int],
        heads: int,
        window: int,
        shift: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        def attend(qkv: Tensor, table: Tensor) -> Tensor:
            out = implementation(qkv, table, window, shift)
            assert out.dtype == dtype
            return out

        *picture, channels = shape_BHWC
        inputs = torch.randn(*picture, 3 * channels) * 1.5, torch.randn((2 * window - 1) ** 2, heads) * 2
        agrees(attend, lambda *exact: reference.window_attention(*exact, window, shift), inputs, dtype, device)

    return check
