"""Random MLPs, and their expected results from torch modules in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.ops.fused_linear import moment_parts, moments_in_parts
from redline.ops.fused_mlp import fused_mlp

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Compares one MLP, on rows inside wider ones, with torch modules in fp64."""

    def check(
        implementation: str,
        rows: int,
        channels: int,
        hidden: int,
        columns: int,
        filled: int = 0,
        activation: str = "",
        residual: bool = False,
        share: float = 1.0,
        with_moments: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        wide = channels + filled
        # The neighboring elements must be neither read nor overwritten.
        among = torch.full((rows, wide + 16), torch.nan, device=device, dtype=dtype)
        x = among[:, 8 : 8 + wide]
        x.copy_(F.pad(drawn(rows, channels) + 0.3, (0, filled)))
        inner = F.pad(drawn(hidden, channels) / channels**0.5, (0, filled))
        outer = drawn(columns, wide + hidden) / (wide + hidden) ** 0.5
        inner_bias, outer_bias = drawn(hidden), drawn(columns)
        old = drawn(rows, columns + 8)[:, :columns] if residual else None
        target = torch.full((rows, columns + 16), 7.0, device=device, dtype=dtype)
        out = target[:, 8 : 8 + columns]
        new = torch.full((moment_parts(columns), 2, rows), torch.nan, device=device) if with_moments else None
        fused_mlp(
            x, inner, inner_bias, outer, outer_bias, out, moments_in_parts(x), inner.float().sum(1), channels, 1e-5,
            activation, old, share, new, implementation,
        )  # fmt: skip

        exact = nn.LayerNorm(channels, elementwise_affine=False)(x[:, :channels].double())
        made = F.gelu(F.linear(exact, inner[:, :channels].double(), inner_bias.double()))
        expected = F.linear(torch.cat((x.double(), made), 1), outer.double(), outer_bias.double())
        if activation:
            expected = F.gelu(expected) if activation == "gelu" else F.leaky_relu(expected, 0.2)
        if old is not None:
            expected = old.double() + share * expected
        error = (out.double() - expected).norm() / expected.norm()
        assert error <= LIMITS[dtype], f"off by {error:.2e}"
        assert (target[:, :8] == 7).all() and (target[:, 8 + columns :] == 7).all()
        if new is not None:
            of_out = torch.stack((out.double().sum(1), out.double().square().sum(1)))
            torch.testing.assert_close(new.double().sum(0), of_out, rtol=1e-5, atol=1e-4)

    return check
