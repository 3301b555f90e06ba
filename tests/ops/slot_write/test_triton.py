"""Tests the Triton kernels of slot write, on a GPU or interpreted on a CPU."""

from itertools import product

import pytest
import torch

from redline.errors import MachineError
from redline.ops.slot_write import slot_write

from .one_by_one import Sizes, example, one_by_one

triton = pytest.importorskip("redline.ops.slot_write.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if triton.kernel.INTERPRETED else [torch.bfloat16])
SIZES = [(2, 6, 11, 2, 8), (1, 5, 1, 1, 3), (1, 33, 9, 3, 5)]
# Interpreted runs are slow, so every size and fill is tested in one of the dtypes.
CASES = [
    (sizes, filled, dtype)
    for place, (sizes, filled) in enumerate(product(SIZES, (0.0, 0.6, 1.0)))
    for dtype in (DTYPES[place % 2 :][:1] if triton.kernel.INTERPRETED else DTYPES)
]
# Every merge rounds the means once, and the two sides may round differently.
ROUNDINGS = 4

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def check(sizes: Sizes, filled: float, dtype: torch.dtype, threshold: float = 0.85) -> None:
    slots, offered = example(*sizes, dtype, filled, DEVICE)
    before = [tensor.clone() for tensor in slots]
    with torch.no_grad():
        after, written = slot_write(slots, *offered, threshold, "triton")
    expected, became = one_by_one(slots, offered, threshold)
    assert [one.tolist() for one in written] == [one.tolist() for one in became]
    for name in ("score_BM", "mass_BM", "usage_BM", "age_BM"):
        assert torch.equal(getattr(after, name), getattr(expected, name)), name
    limit = ROUNDINGS * torch.finfo(dtype).eps
    for name in ("key_BMHD", "value_BMHD"):
        torch.testing.assert_close(getattr(after, name), getattr(expected, name), rtol=limit, atol=limit)
    assert all(torch.equal(one, other) for one, other in zip(slots, before, strict=True))


@pytest.mark.parametrize(("sizes", "filled", "dtype"), CASES)
def test_agrees_with_writing_one_token_at_a_time(sizes: Sizes, filled: float, dtype: torch.dtype) -> None:
    check(sizes, filled, dtype)


def test_agrees_with_keys_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_LARGEST_BLOCK", 16)
    check((1, 4, 6, 3, 13), 0.8, torch.float32)


def test_unwanted_tokens_change_nothing() -> None:
    slots, (keys, values, scores, wanted) = example(2, 7, 5, 1, 8, torch.float32, 0.5, DEVICE)
    with torch.no_grad():
        after, written = slot_write(slots, keys, values, scores, torch.zeros_like(wanted), 0.85, "triton")
    assert all(torch.equal(one, other) for one, other in zip(after, slots, strict=True))
    assert not any(one.any() for one in written)


def test_passes_opcheck() -> None:
    slots, (keys, values, scores, wanted) = example(1, 3, 2, 1, 4, torch.float32, 0.5, DEVICE)
    torch.library.opcheck(triton._write, (*slots, keys, values, scores, wanted.to(torch.int8), 0.85))


def test_a_gradient_is_refused() -> None:
    slots, (keys, values, scores, wanted) = example(2, 7, 5, 1, 8, torch.float32, 0.5, DEVICE)
    with pytest.raises(MachineError, match="no backward pass"):
        slot_write(slots, keys.requires_grad_(), values, scores, wanted, 0.85, "triton")
    doubles, offered = example(2, 7, 5, 1, 8, torch.float64, 0.5, DEVICE)
    with pytest.raises(MachineError, match="must be float32"):
        slot_write(doubles, *offered, 0.85, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_at_the_size_of_a_model(dtype: torch.dtype) -> None:
    check((4, 512, 32, 12, 64), 1.0, dtype)


@pytest.mark.gpu
def test_a_cuda_graph_replay_is_deterministic() -> None:
    slots, offered = example(2, 128, 32, 4, 64, torch.bfloat16, 0.9, "cuda")
    with torch.no_grad():
        expected, _ = slot_write(slots, *offered, 0.85)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed, _ = slot_write(slots, *offered, 0.85)
        for _ in range(3):
            graph.replay()
            assert all(torch.equal(one, other) for one, other in zip(replayed, expected, strict=True))


@torch.no_grad()
def test_compiles_without_graph_breaks() -> None:
    slots, (keys, *others) = example(1, 4, 3, 1, 8, torch.float32, 0.5, DEVICE)

    def written(given: torch.Tensor) -> list[torch.Tensor]:
        after, counts = slot_write(slots, 2 * given, *others, 0.85, "triton")
        return [*after, *counts]

    compiled = torch.compile(written, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    assert all(torch.equal(one, other) for one, other in zip(compiled(keys), written(keys), strict=True))
