"""Tests the Triton kernels, on a GPU or interpreted on a CPU (as `make test` runs this file).

TRITON_INTERPRET must be set before Triton is imported.
"""

from collections.abc import Callable

import pytest
import torch

from redline.errors import MachineError
from redline.ops.window_attention import expand_bias_table, reference, window_attention

triton = pytest.importorskip("redline.ops.window_attention.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
# Heads of 30, 53, 122, 46 and 77 channels, with one or two of the 2 to 6 heads of a layer.
DRCT = [(60, 2, 0), (53, 1, 2), (122, 1, 0), (46, 1, 2), (77, 1, 0)]


@pytest.mark.parametrize(("channels", "heads", "shift"), DRCT)
def test_agrees_for_the_heads_of_drct(agrees: Agrees, channels: int, heads: int, shift: int) -> None:
    agrees(triton.window_attention, (1, 4, 4, channels), heads, 4, shift, device=DEVICE)


@pytest.mark.parametrize(
    ("picture", "shift", "dtype"),
    [((3, 8, 4), 0, torch.float32), ((1, 4, 4), 2, torch.float16), ((1, 8, 8), 1, torch.float16)],
)
def test_agrees_for_odd_batches_and_shapes(
    agrees: Agrees, picture: tuple[int, ...], shift: int, dtype: torch.dtype
) -> None:
    agrees(triton.window_attention, (*picture, 5), 1, 4, shift, dtype, DEVICE)


@pytest.mark.parametrize(
    ("size", "pieces"), [(48, (32, 16)), (80, (64, 16)), (96, (64, 32)), (64, (64, 0)), (56, (64, 0))]
)
def test_heads_of_two_powers_of_two_are_read_in_two_pieces(agrees: Agrees, size: int, pieces: tuple[int, int]) -> None:
    assert triton._pieces(size) == pieces
    agrees(triton.window_attention, (1, 4, 4, size), 1, 4, 2, torch.float16, DEVICE)


def test_agrees_for_windows_of_several_blocks(agrees: Agrees, monkeypatch: pytest.MonkeyPatch) -> None:
    small = triton.Tiles(queries=32, keys=32, warps=4, stages=1)
    monkeypatch.setattr(triton, "FORWARD_TILES", dict.fromkeys(triton.FORWARD_TILES, small))
    monkeypatch.setattr(triton, "BACKWARD_TILES", dict.fromkeys(triton.BACKWARD_TILES, small))
    monkeypatch.setattr(triton, "_BIAS_PROGRAMS", 4)  # so that one program sums several windows
    agrees(triton.window_attention, (1, 8, 16, 13), 1, 8, 4, device=DEVICE)


def test_agrees_at_windows_of_sixteen(agrees: Agrees, monkeypatch: pytest.MonkeyPatch) -> None:
    large = triton.Tiles(queries=128, keys=128, warps=8, stages=1)
    monkeypatch.setattr(triton, "FORWARD_TILES", dict.fromkeys(triton.FORWARD_TILES, large))
    monkeypatch.setattr(triton, "BACKWARD_TILES", dict.fromkeys(triton.BACKWARD_TILES, large))
    agrees(triton.window_attention, (1, 16, 16, 30), 1, 16, 8, torch.float16, DEVICE)


@pytest.mark.parametrize(("size", "dtype"), [(30, torch.float32), (48, torch.float16)])
def test_an_expanded_table_gives_the_same_result(size: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(2, 4, 4, 6 * size, device=DEVICE).to(dtype)
    table = torch.randn(49, 2, device=DEVICE).to(dtype)
    for shift in (0, 2):
        expected = triton.window_attention(qkv, table, 4, shift)
        assert torch.equal(triton.window_attention_expanded(qkv, expand_bias_table(table, 4), shift), expected)
    torch.library.opcheck(triton.window_attention_expanded, (qkv[:1], expand_bias_table(table, 4), 2))


def test_takes_a_table_of_another_dtype_and_tokens_of_any_strides() -> None:
    qkv = torch.randn(1, 27, 4, 8, device=DEVICE, dtype=torch.float16).permute(0, 2, 3, 1)
    table = torch.randn(49, 3, device=DEVICE)
    out = triton.window_attention(qkv, table, 4, 2)
    expected = reference.window_attention(qkv.double(), table.double(), 4, 2)
    assert (out.double() - expected).norm() <= torch.finfo(torch.float16).eps * expected.norm()


def test_only_the_table_or_only_the_tokens_may_require_grad() -> None:
    qkv, table = torch.randn(1, 4, 4, 12, device=DEVICE), torch.randn(49, 2, device=DEVICE)
    expected = torch.autograd.grad(
        reference.window_attention(qkv.requires_grad_(), table.requires_grad_(), 4).square().sum(), (qkv, table)
    )
    (of_qkv,) = torch.autograd.grad(triton.window_attention(qkv, table.detach(), 4).square().sum(), qkv)
    (of_table,) = torch.autograd.grad(triton.window_attention(qkv.detach(), table, 4).square().sum(), table)
    torch.testing.assert_close((of_qkv, of_table), expected, atol=1e-5, rtol=1e-5)


def test_passes_opcheck() -> None:
    qkv = torch.randn(1, 4, 4, 6, device=DEVICE, requires_grad=True)
    table = torch.randn(49, 1, device=DEVICE, requires_grad=True)
    torch.library.opcheck(triton._forward, (qkv, table, 4, 2))


def test_compiles_without_graph_breaks() -> None:
    qkv = torch.randn(1, 4, 4, 9, device=DEVICE, requires_grad=True)
    table = torch.randn(49, 1, device=DEVICE, requires_grad=True)

    def block(qkv: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return window_attention(qkv + 1, table, 4, 2, "triton").sin()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(qkv, table)
    eager = block(qkv, table)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.square().sum(), (qkv, table)),
        torch.autograd.grad(eager.square().sum(), (qkv, table)),
    )


@pytest.mark.parametrize(
    ("qkv", "rows", "window", "sentence"),
    [
        (torch.zeros(1, 4, 4, 6, dtype=torch.float64), 49, 4, "unsupported dtype float64 .*float32."),
        (torch.zeros(1, 6, 6, 6), 121, 6, "unsupported window 6 .supported: 4, 8, 16, 32."),
        (torch.zeros(1, 4, 4, 390), 49, 4, "heads may have at most 128 channels, not 130"),
        (torch.zeros(0, 4, 4, 6), 49, 4, "the input is empty"),
    ],
)
def test_unsupported_inputs_are_refused(qkv: torch.Tensor, rows: int, window: int, sentence: str) -> None:
    table = torch.zeros(rows, 1, device=DEVICE, dtype=qkv.dtype)
    with pytest.raises(MachineError, match=f"{sentence}.$"):
        window_attention(qkv.to(DEVICE), table, window, implementation="triton")
    assert window_attention(qkv.to(DEVICE), table, window, implementation="sdpa").shape[:3] == qkv.shape[:3]
