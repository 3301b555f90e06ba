"""Tests the Triton kernels of convolved heads, on a GPU or interpreted on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.errors import MachineError
from redline.ops.convolved_heads import convolved_heads, reference

triton = pytest.importorskip("redline.ops.convolved_heads.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def inputs(batch: int, tokens: int, taps: int, heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    channels = heads * (2 * key_dim + value_dim)
    x = torch.randn(batch, tokens, channels)
    return [x, torch.randn(taps, channels), torch.randn(batch, taps - 1, channels)]


@pytest.mark.parametrize(("packed", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.float16)])
# Several blocks of tokens; several blocks of channels; several heads and sequences of fewer tokens than taps.
@pytest.mark.parametrize("sizes", [(1, 70, 4, 1, 8, 12), (1, 33, 3, 1, 48, 40), (2, 2, 4, 2, 5, 7)])
def test_agrees(agrees: Agrees, sizes: tuple[int, ...], packed: bool, dtype: torch.dtype) -> None:
    (batch, tokens, _, heads, key_dim, _), documents = sizes, None
    if packed:
        documents = torch.randint(2, (batch, tokens), device=DEVICE).cumsum(1)
    agrees(
        lambda *given: triton.convolved_heads(*given, heads, key_dim, documents),
        lambda *given: reference.convolved_heads(*given, heads, key_dim, documents),
        inputs(*sizes),
        dtype,
        DEVICE,
    )


def test_one_tap_uses_only_the_token_itself(agrees: Agrees) -> None:
    x, taps, recent = inputs(2, 5, 1, 2, 4, 4)
    agrees(
        lambda x, taps: triton.convolved_heads(x, taps, recent.to(x), 2, 4),
        lambda x, taps: reference.convolved_heads(x, taps, recent.to(x), 2, 4),
        [x, taps],
        torch.float32,
        DEVICE,
    )


def test_zero_queries_have_the_gradients_of_the_reference() -> None:
    x, taps, recent = (t.to(DEVICE) for t in inputs(1, 6, 4, 1, 4, 4))
    x[:, :4, :4], recent[..., :4] = 0, 0  # the first queries are zero
    given = [t.requires_grad_() for t in (x, taps, recent)]
    found, expected = (f(*given, 1, 4) for f in (triton.convolved_heads, reference.convolved_heads))
    grads = [torch.zeros_like(found[0]), *(torch.randn_like(one) for one in found[1:])]
    for one, other in zip(
        (*found, *torch.autograd.grad(found, given, grads)),
        (*expected, *torch.autograd.grad(expected, given, grads)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_slices_are_read_in_place() -> None:
    x, taps, recent = (t.to(DEVICE) for t in inputs(2, 6, 4, 2, 4, 4))
    wide = torch.cat((x, torch.randn(2, 6, 7, device=DEVICE)), -1)
    for given in (wide[..., :24], x.transpose(1, 2).contiguous().transpose(1, 2)):
        for one, other in zip(
            triton.convolved_heads(given, taps, recent, 2, 4), reference.convolved_heads(x, taps, recent, 2, 4),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(one, other)


def test_mixed_dtypes_promote() -> None:
    x, taps, recent = (t.to(DEVICE) for t in inputs(1, 9, 4, 1, 4, 4))
    found = triton.convolved_heads(x.half(), taps, recent.half(), 1, 4)
    expected = reference.convolved_heads(x.half().float(), taps, recent.half().float(), 1, 4)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other)


def test_passes_opcheck() -> None:
    x, taps, recent = (t.to(DEVICE).requires_grad_() for t in inputs(1, 3, 2, 1, 4, 6))
    documents = torch.randint(2, (1, 3), device=DEVICE).cumsum(1)
    torch.library.opcheck(triton.convolved_heads, (x, taps, recent, 1, 4, documents))


def test_compiles_without_graph_breaks(compiled_agrees: Callable[..., None]) -> None:
    x, taps, recent = (t.to(DEVICE).requires_grad_() for t in inputs(1, 3, 2, 1, 4, 4))

    def block(x: Tensor, taps: Tensor, recent: Tensor) -> tuple[Tensor, ...]:
        return convolved_heads(x + 1, taps, recent, 1, 4, implementation="triton")

    compiled_agrees(block, [x, taps, recent])


@pytest.mark.parametrize(
    ("taps", "key_dim", "dtype", "sentence"),
    [
        (4, 4, torch.float64, "unsupported dtype float64 .*float32."),
        (17, 4, torch.float32, "at most 16 taps are supported, not 17"),
        (4, 300, torch.float32, "at most 256 channels, not 300"),
    ],
)
def test_unsupported_inputs_are_refused(taps: int, key_dim: int, dtype: torch.dtype, sentence: str) -> None:
    given = (t.to(DEVICE, dtype) for t in inputs(1, 3, taps, 1, key_dim, 4))
    with pytest.raises(MachineError, match=sentence):
        convolved_heads(*given, 1, key_dim, implementation="triton")
