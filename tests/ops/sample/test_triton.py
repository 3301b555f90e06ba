"""Tests the Triton kernels of sampling, on a GPU or interpreted on a CPU."""

import pytest
import torch

from redline.ops.sample import reference, sample

triton = pytest.importorskip("redline.ops.sample.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
def test_draws_are_those_of_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(24, vocabulary, dtype=dtype, device=DEVICE)
    heat = torch.tensor([0.0, 0.5, 1.0, 3.0], device=DEVICE).repeat(6)
    keys = torch.randint(2**32, (24,), device=DEVICE)
    same = 0
    for drawn in (0, 1, 2**31):
        numbers = (heat, keys, torch.full((24,), drawn, device=DEVICE))
        found = sample(logits, *numbers, "triton")
        assert found.dtype == torch.int64
        same += int((found == reference.sample(logits, *numbers)).sum())
    # Logarithms differ in the last bit, which can swap two tokens that are nearly equal.
    assert same >= 3 * 24 - 1


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = torch.randn(5, 5000, device=DEVICE)
    logits[0, 4500], logits[1, 5], logits[2], logits[3, 1:] = (
        float("nan"),
        float("inf"),
        float("-inf"),
        float("-inf"),
    )
    zeros = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    for heat in (0.0, 1.0):
        found = sample(logits, torch.full((5,), heat, device=DEVICE), zeros, zeros, "triton").tolist()
        assert found[:4] == [-1, -1, -1, 0] and found[4] >= 0


def test_the_first_of_equal_tokens_is_taken() -> None:
    zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    logits = torch.zeros(1, 9000, device=DEVICE).index_fill(1, torch.tensor([300, 8000], device=DEVICE), 1.0)
    assert sample(logits, torch.zeros(1, device=DEVICE), zeros, zeros, "triton").item() == 300


def test_passes_opcheck() -> None:
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    torch.library.opcheck(
        triton.sample, (torch.randn(2, 30, device=DEVICE), torch.ones(2, device=DEVICE), zeros, zeros)
    )
