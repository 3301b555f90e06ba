"""Tests the Triton kernel, on a GPU or interpreted on a CPU (as `make test` runs this file)."""

from collections.abc import Callable

import pytest
import torch

from redline.errors import MachineError, ModelError
from redline.ops.fused_linear import fused_linear

kernel = pytest.importorskip("redline.ops.kernel")
triton = pytest.importorskip("redline.ops.fused_linear.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
HALF = torch.float16 if triton.kernel.INTERPRETED else torch.bfloat16
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.fixture(params=[True, False], ids=["by descriptors", "by addresses"])
def by_descriptors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels support all sizes, whichever is chosen."""
    monkeypatch.setattr(kernel, "has_descriptors", lambda _: request.param)
    monkeypatch.setattr(triton, "_SOME", 0 if request.param else 64)


@pytest.mark.usefixtures("by_descriptors")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("rows", "channels", "filled", "columns"),
    [(1, 8, 0, 8), (131, 180, 4, 24), (129, 60, 4, 296), (64, 16, 0, 128), (7, 180, 4, 136)],
)
def test_agrees_at_odd_sizes(
    agrees: Agrees, rows: int, channels: int, filled: int, columns: int, dtype: torch.dtype
) -> None:
    agrees("triton", rows, channels, columns, filled, with_moments=True, dtype=dtype, device=DEVICE)


@pytest.mark.usefixtures("by_descriptors")
@pytest.mark.parametrize("activation", ["", "gelu", "leaky_relu"])
@pytest.mark.parametrize(("normalize", "share"), [(True, 1.0), (False, 0.2)])
def test_agrees_with_normalization_activation_and_residual(
    agrees: Agrees, activation: str, normalize: bool, share: float
) -> None:
    agrees("triton", 70, 24, 72, 0, normalize, activation, True, share, True, HALF, DEVICE)


def test_a_large_mean_cancels_accurately(agrees: Agrees) -> None:
    """The mean is subtracted after the product, where it must cancel accurately."""
    agrees("triton", 33, 64, 40, dtype=torch.float32, device=DEVICE, offset=10.0)


@pytest.mark.parametrize(
    ("channels", "columns", "sentence"),
    [(7, 8, "channels must be a multiple of 8, not 7"), (8, 3, "columns must be a multiple of 8, not 3")],
)
def test_unsupported_sizes_are_refused(channels: int, columns: int, sentence: str) -> None:
    x, out = torch.zeros(4, channels, device=DEVICE), torch.zeros(4, columns, device=DEVICE)
    with pytest.raises(MachineError, match=sentence):
        fused_linear(x, x.new_zeros(columns, channels), x.new_zeros(columns), out, implementation="triton")


@pytest.mark.parametrize("begin", [4, 8])
def test_rows_must_be_aligned(begin: int) -> None:
    among = torch.ones(4, 24, device=DEVICE)
    given = among[:, begin : begin + 8], among.new_ones(8, 8), among.new_ones(8), among.new_zeros(4, 8)
    if begin == 8:
        fused_linear(*given, implementation="triton")
        assert (given[3] == 9).all()
        return
    with pytest.raises(ModelError, match="must start at multiples of 8 elements"):
        fused_linear(*given, implementation="triton")


def test_passes_opcheck() -> None:
    x, weight, bias = (torch.randn(shape, device=DEVICE) for shape in ((6, 8), (16, 8), (16,)))
    out, new = torch.zeros(6, 16, device=DEVICE), torch.zeros(1, 2, 6, device=DEVICE)
    arguments = (x, weight, bias, out, None, None, 0, 1e-5, "gelu", None, 1.0, new)
    torch.library.opcheck(triton.fused_linear, arguments)


def test_compiles_without_graph_breaks() -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], weight.shape[0] + 8, device=x.device)
        fused_linear(x + 1, weight, bias, out[:, 8:], activation="gelu", implementation="triton")
        return out.sin()

    given = [torch.randn(shape, device=DEVICE) for shape in ((6, 8), (16, 8), (16,))]
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(*given), layer(*given))
