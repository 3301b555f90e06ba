"""Tests the Triton kernel, on a GPU or interpreted on a CPU (as `make test` runs this file)."""

from collections.abc import Callable

import pytest
import torch

from redline.errors import MachineError
from redline.ops.fused_mlp import fused_mlp

linear = pytest.importorskip("redline.ops.fused_linear.triton")
triton = pytest.importorskip("redline.ops.fused_mlp.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
HALF = torch.float16 if triton.kernel.INTERPRETED else torch.bfloat16
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "channels", "filled", "hidden", "columns"),
    [(1, 8, 0, 8, 8), (131, 180, 4, 72, 32), (129, 60, 4, 136, 184), (64, 16, 0, 64, 128), (33, 276, 4, 40, 40)],
)
def test_agrees_at_odd_sizes(
    agrees: Agrees, rows: int, channels: int, filled: int, hidden: int, columns: int, dtype: torch.dtype
) -> None:
    agrees("triton", rows, channels, hidden, columns, filled, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize(("activation", "residual", "share"), [("gelu", True, 0.2), ("leaky_relu", False, 1.0)])
@pytest.mark.parametrize("columns", [32, 136])
def test_agrees_with_normalization_activation_and_residual(
    agrees: Agrees, columns: int, activation: str, residual: bool, share: float, with_moments: bool
) -> None:
    agrees("triton", 70, 24, 72, columns, 0, activation, residual, share, with_moments, HALF, DEVICE)


@pytest.mark.parametrize(("channels", "columns"), [(24, 200), (328, 32)], ids=["columns", "channels"])
def test_wide_rows_run_two_layers(agrees: Agrees, channels: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "mlp_kernel", None)
    agrees("triton", 70, channels, 72, columns, 0, "leaky_relu", True, 0.2, dtype=HALF, device=DEVICE)


def test_little_shared_memory_runs_two_layers(agrees: Agrees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.kernel, "shared_bytes", lambda _: 99 * 2**10)
    monkeypatch.setattr(triton, "mlp_kernel", None)
    monkeypatch.setattr(linear.kernel, "has_descriptors", lambda _: False)
    monkeypatch.setattr(linear, "descriptor_kernel", None)
    agrees("triton", 70, 24, 72, 32, dtype=HALF, device=DEVICE)


def test_passes_opcheck() -> None:
    shapes = ((6, 8), (16, 8), (16,), (24, 24), (24,))
    x, inner, inner_bias, outer, outer_bias = (torch.randn(shape, device=DEVICE).half() for shape in shapes)
    out, sums = x.new_zeros(6, 24), torch.zeros(1, 2, 6, device=DEVICE)
    arguments = (x, inner, inner_bias, outer, outer_bias, out, sums, inner.float().sum(1), 8, 1e-5, "", None, 1.0)
    torch.library.opcheck(triton.fused_mlp, (*arguments, sums.clone()))


def test_unsupported_sizes_are_refused() -> None:
    x, inner, outer = (torch.zeros(shape, device=DEVICE) for shape in ((4, 8), (8, 8), (3, 16)))
    moments, out = x.new_zeros(1, 2, 4), x.new_zeros(4, 3)
    with pytest.raises(MachineError, match="columns must be a multiple of 8, not 3"):
        fused_mlp(x, inner, inner[0], outer, outer[:, 0], out, moments, inner[0], 8, implementation="triton")
