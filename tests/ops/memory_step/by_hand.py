"""Random tokens and layers, and a step computed head by head in fp64."""

import torch
from torch import Tensor

from redline.ops.memory_step import Learned, Projected

Sizes = tuple[int, int, int, int, int]
Given = tuple[Projected, Learned, Tensor, Tensor]
EPS = 1e-5


def example(sizes: Sizes, dtype: torch.dtype, device: str = "cpu") -> Given:
    """`sizes` are sequences, heads, keys, values and taps. Decays range from nearly none to complete."""
    batch, heads, keys, values, taps = sizes
    channels, exact = heads * (2 * keys + values), torch.promote_types(dtype, torch.float32)

    def drawn(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(device, to)

    raw = (8 * torch.randn(batch, heads)).to(device, dtype)
    token = Projected(drawn(batch, channels), raw, drawn(batch, heads), drawn(batch, heads * values))
    learned = Learned(drawn(taps, channels), drawn(heads), drawn(heads), drawn(values))
    return token, learned, drawn(batch, taps - 1, channels), drawn(batch, heads, keys, values, to=exact)


def doubled(given: Given) -> Given:
    token, learned, recent, state = given
    return (
        Projected(*(one.double() for one in token)),
        Learned(*(one.double() for one in learned)),
        recent.double(),
        state.double(),
    )


def assert_near(found: tuple[Tensor, ...], given: Given, of_read: float, of_state: float) -> None:
    """Returns relative errors. Those of the output are scaled by the amplification of RMSNorm."""
    gated, recent, state = (tensor.double() for tensor in found)
    *expected, lengthened_BH = by_hand(given)
    heads = lengthened_BH.shape[1]
    off, whole = ((one.unflatten(1, (heads, -1))).norm(dim=-1) for one in (gated - expected[0], expected[0]))
    assert (off <= of_read * lengthened_BH * whole).all()
    assert torch.equal(recent, expected[1])
    assert (state - expected[2]).norm() <= of_state * expected[2].norm()


def by_hand(given: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the results, and the ratio of the norms of each head's state and output."""
    token, learned, recent, state = doubled(given)
    batch, heads, keys, values = state.shape
    gated, after, lengthened = (torch.empty_like(one) for one in (token.gate_BG, state, token.decay_BH))
    seen = torch.cat((recent, token.mixed_BC[:, None]), 1)
    for row in range(batch):
        total = torch.stack([tap * held for tap, held in zip(learned.taps_TC, seen[row], strict=True)]).sum(0)
        total = total / (1 + (-total).exp())
        for head in range(heads):
            query, key = (total[at : at + keys] for at in (head * keys, (heads + head) * keys))
            value = total[2 * heads * keys + head * values :][:values]
            query, key = query / query.norm(), key / key.norm()
            speed = torch.log1p((token.decay_BH[row, head] + learned.decay_bias_H[head]).exp())
            matrix = state[row, head] * (-learned.log_rate_H[head].exp() * speed).exp()
            beta = 1 / (1 + (-token.strength_BH[row, head]).exp())
            matrix = matrix + beta * torch.outer(key, value - matrix.T @ key)
            read = matrix.T @ query
            lengthened[row, head] = matrix.norm() / read.norm()
            read = read / (read.square().mean() + EPS).sqrt() * learned.norm_V
            place = slice(head * values, (head + 1) * values)
            gated[row, place] = read / (1 + (-token.gate_BG[row, place]).exp())
            after[row, head] = matrix
    return gated, seen[:, 1:], after, lengthened
