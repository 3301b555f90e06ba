"""A fallback to plain PyTorch on a GPU warns, also under torch.compile."""

import warnings

import pytest
import torch
from torch import Tensor

from redline.ops.dispatch import choose


def doubled(x: Tensor) -> Tensor:
    chosen = choose("doubling", "auto", torch.device("cuda"), lambda: "the kernels were never written")
    return x * (2 if chosen == "reference" else 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fallback_warns_once(compiled: bool) -> None:
    pytest.importorskip("triton")
    run = torch.compile(doubled, backend="eager", fullgraph=True) if compiled else doubled
    with pytest.warns(UserWarning, match="doubling: falling back to plain PyTorch, .*: the kernels were never"):
        assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        run(torch.ones(3))
    # A traced warning is not repeated.
    assert len(again) == (0 if compiled else 1)
