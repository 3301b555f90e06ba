"""Random layers, and their expected results from torch modules in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.ops.fused_linear import fused_linear, moment_parts, moments

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Compares one layer, on rows inside wider ones, with torch modules in fp64."""

    def check(
        implementation: str,
        rows: int,
        channels: int,
        columns: int,
        filled: int = 0,
        normalize: bool = True,
        activation: str = "",
        residual: bool = False,
        share: float = 1.0,
        with_moments: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        offset: float = 0.3,
    ) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        wide = channels + filled
        # The neighboring elements must be neither read nor overwritten.
        among = torch.full((rows, wide + 16), torch.nan, device=device, dtype=dtype)
        x = among[:, 8 : 8 + wide]
        x.copy_(F.pad(drawn(rows, channels) + offset, (0, filled)))
        weight = F.pad(drawn(columns, channels) / channels**0.5, (0, filled))
        bias = drawn(columns)
        old = drawn(rows, columns + 8)[:, :columns] if residual else None
        target = torch.full((rows, columns + 16), 7.0, device=device, dtype=dtype)
        out = target[:, 8 : 8 + columns]
        options: dict[str, Any] = {"activation": activation, "residual_MN": old, "share": share}
        if normalize:
            blocks = x.split(128, -1)
            options |= {"moments_P2M": torch.stack([moments(block) for block in blocks]), "channels": channels}
            options["weight_sums_N"] = weight.float().sum(1)
        new = torch.full((moment_parts(columns), 2, rows), torch.nan, device=device) if with_moments else None
        fused_linear(x, weight, bias, out, new_moments_P2M=new, implementation=implementation, **options)

        exact = x[:, :channels].double()
        if normalize:
            exact = nn.LayerNorm(channels, elementwise_affine=False)(exact)
        expected = F.linear(exact, weight[:, :channels].double(), bias.double())
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
