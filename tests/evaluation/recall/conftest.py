"""What trainings of small models want of a CPU."""

import platform
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def small_products() -> Iterator[None]:
    """They are no faster on two threads, and other tests run beside.

    OpenBLAS on Arm is many times slower at those whose right side is transposed; of a copy, sums of some shapes round
    differently.
    """
    before, overrides = torch.get_num_threads(), torch.library.Library("aten", "IMPL")
    torch.set_num_threads(1)
    try:
        if platform.machine() in ("aarch64", "arm64"):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                overrides.impl("bmm", _by_a_straight_right_side, "CPU")
        yield
    finally:
        overrides._destroy()
        torch.set_num_threads(before)


def _by_a_straight_right_side(one: Tensor, other: Tensor) -> Tensor:
    out = one.new_empty(len(one), one.shape[1], other.shape[2])
    return torch.bmm(one, other.contiguous(), out=out)
