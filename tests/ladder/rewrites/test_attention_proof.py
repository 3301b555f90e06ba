"""How a rewritten module is compared with the original: which inputs, which tolerance, which gradients."""

import pytest
import torch
from torch import Tensor, nn

from redline.errors import first_line
from redline.ladder.rewrites.attention_match import NoMatch
from redline.ladder.rewrites.attention_proof import TOLERANCE, _compare, _run, _trial_input
from redline.ladder.rewrites.attention_rewrite import _is_constant, _trace

MASK = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))


@pytest.mark.parametrize("fresh", [False, True])
def test_masks_whole_numbers_and_constants_stay_what_they_are(fresh: bool) -> None:
    for given in (7, None, "mean", torch.arange(3), torch.tensor([True])):
        assert _trial_input(given, fresh) is given
    assert torch.equal(_trial_input(MASK.half(), fresh), MASK)


def test_floats_are_recorded_first_and_random_second() -> None:
    given = torch.randn(64, dtype=torch.float64)
    assert torch.equal(_trial_input(given, False), given.float())
    drawn = _trial_input(given, True)
    assert drawn.shape == given.shape and not torch.equal(drawn, given.float()) and 0.5 < drawn.std() < 2
    for broken in (torch.full((64,), float("nan")), torch.cat((torch.tensor([float("nan"), float("inf")]), given[2:]))):
        assert _trial_input(broken, False).isfinite().all()


def test_differences_beyond_rounding_fail_the_proof() -> None:
    one = torch.full((4,), 2.0, dtype=torch.float64)
    _compare([one], [one * (1 + 0.9 * TOLERANCE)])
    for wrong, sentence in (
        (one * (1 + 1.1 * TOLERANCE), "equality is not proven"),
        (one * float("nan"), "equality is not proven"),
        (one[:3], "a different shape"),
    ):
        with pytest.raises(NoMatch, match=sentence):
            _compare([one], [wrong])


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.ones(4, 4).tril())

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x @ self.used * scale, torch.arange(3)


def test_gradients_are_compared_at_the_size_of_the_output() -> None:
    twin, x = Product(), torch.randn(5, 4)
    assert [tuple(t.shape) for t in _run(Product.forward, twin, (x,), {"scale": 2.0}, False)] == [(5, 4)]
    output, *gradients = _run(Product.forward, twin, (x,), {"scale": 2.0}, True)
    torch.testing.assert_close(output, 2 * x @ twin.used)
    assert [tuple(g.shape) for g in gradients] == [(5, 4), (4, 4), (2,)]
    weights = torch.linspace(-1, 1, 20).reshape(5, 4)
    expected = weights @ twin.used.detach().T
    scaled = expected * (gradients[0].norm() / expected.norm())
    torch.testing.assert_close(gradients[0], scaled, rtol=1e-4, atol=1e-4)
    assert not gradients[2].any()
    size = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(size, output.norm(), rtol=1e-5, atol=0)
    assert not x.requires_grad and twin.used.grad is None


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one.\ntwo")) == "one" and first_line(KeyError()) == "KeyError"


class Constants(Product):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        length = x.size(1)
        return (
            self.table[:length, : x.shape[1]],
            self.table[: x.dim()],
            self.table.to(x.dtype),
            self.table * self.used,
            self.table + x,
            x.mT,
            x.abs(),
        )


def test_a_mask_is_constant_when_buffers_and_sizes_alone_make_it() -> None:
    module = Constants()
    graph = _trace(Constants, module, {})
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    assert [_is_constant(node, module) for node in returned] == [True, True, True, False, False, False, False]
