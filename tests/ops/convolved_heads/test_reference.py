"""Tests the reference of convolved heads against torch's convolution, document by document."""

import torch
from torch.nn import functional as F

from redline.ops.convolved_heads import convolved_heads

HEADS, KEYS, VALUES, TAPS = 2, 4, 6, 4
CHANNELS = HEADS * (2 * KEYS + VALUES)


def expected(x_SC: torch.Tensor, taps_TC: torch.Tensor, recent_TC: torch.Tensor) -> list[torch.Tensor]:
    padded = torch.cat((recent_TC, x_SC)).t()[None]
    mixed = F.silu(F.conv1d(padded, taps_TC.t()[:, None], groups=CHANNELS))[0].t()
    query, key, value = mixed.split([HEADS * KEYS, HEADS * KEYS, HEADS * VALUES], 1)
    query, key, value = (one.unflatten(-1, (HEADS, -1)) for one in (query, key, value))
    return [one / one.norm(dim=-1, keepdim=True) for one in (query, key)] + [value]


def test_is_a_convolution_per_channel() -> None:
    x, recent = torch.randn(3, 9, CHANNELS).double(), torch.randn(3, TAPS - 1, CHANNELS).double()
    taps = torch.randn(TAPS, CHANNELS).double()
    found = convolved_heads(x, taps, recent, HEADS, KEYS)
    for row in range(3):
        for one, other in zip(found, expected(x[row], taps, recent[row]), strict=True):
            torch.testing.assert_close(one[row], other)


def test_documents_are_independent() -> None:
    x, taps = torch.randn(1, 11, CHANNELS).double(), torch.randn(TAPS, CHANNELS).double()
    recent = torch.randn(1, TAPS - 1, CHANNELS).double()
    found = convolved_heads(x, taps, recent, HEADS, KEYS, torch.tensor([[7] * 2 + [8] + [9] * 8]))
    nothing = torch.zeros(TAPS - 1, CHANNELS).double()
    for begin, end, before in ((0, 2, recent[0]), (2, 3, nothing), (3, 11, nothing)):
        for one, other in zip(found, expected(x[0, begin:end], taps, before), strict=True):
            torch.testing.assert_close(one[0, begin:end], other)


def test_passes_gradcheck() -> None:
    x, recent = torch.randn(1, 5, CHANNELS).double(), torch.randn(1, TAPS - 1, CHANNELS).double()
    inputs = [t.requires_grad_() for t in (x, torch.randn(TAPS, CHANNELS).double(), recent)]
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda *given: convolved_heads(*given, HEADS, KEYS, documents), inputs)
