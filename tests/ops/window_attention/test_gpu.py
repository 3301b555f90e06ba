"""Tests the Triton kernels on a GPU: full size, every dtype, CUDA graphs and compilation."""

from collections.abc import Callable

import pytest
import torch

from redline.ops.window_attention import reference, window_attention

triton = pytest.importorskip("redline.ops.window_attention.triton")
Agrees = Callable[..., None]

pytestmark = pytest.mark.gpu
DRCT = [(180, 6, 0), (212, 4, 8), (244, 2, 0), (276, 6, 8), (308, 4, 0)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("dtype", "picture"), [*((dtype, (3, 16, 48)) for dtype in DTYPES), (torch.bfloat16, (1, 16, 16))]
)
@pytest.mark.parametrize(("channels", "heads", "shift"), DRCT)
def test_agrees_in_every_dtype(
    agrees: Agrees, channels: int, heads: int, shift: int, picture: tuple[int, ...], dtype: torch.dtype
) -> None:
    agrees(triton.window_attention, (*picture, channels), heads, 16, shift, dtype, "cuda")


@pytest.mark.parametrize(
    ("dtype", "window"), [*((dtype, 8) for dtype in DTYPES), (torch.bfloat16, 4), (torch.bfloat16, 32)]
)
def test_agrees_at_other_windows(agrees: Agrees, window: int, dtype: torch.dtype) -> None:
    agrees(triton.window_attention, (1, 2 * window, 3 * window, 60), 4, window, window // 2, dtype, "cuda")


@pytest.mark.parametrize(("channels", "heads", "shift"), DRCT)
def test_agrees_at_full_size(agrees: Agrees, channels: int, heads: int, shift: int) -> None:
    agrees(triton.window_attention, (1, 256, 256, channels), heads, 16, shift, torch.bfloat16, "cuda")


def test_is_deterministic() -> None:
    qkv = torch.randn(2, 64, 64, 540, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(961, 6, device="cuda", requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(triton.window_attention(qkv, table, 16, 8).square().sum(), (qkv, table))

    first = gradients()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, gradients(), strict=True))


def test_auto_uses_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(triton, "window_attention", lambda *_: called.append("triton"))
    for dtype in DTYPES:
        window_attention(torch.randn(1, 8, 8, 18, device="cuda", dtype=dtype), torch.randn(49, 2).to("cuda", dtype), 4)
    assert len(called) == len(DTYPES)


def test_a_fallback_warns() -> None:
    qkv, table = torch.randn(1, 8, 8, 18, device="cuda").double(), torch.randn(49, 2, device="cuda").double()
    with pytest.warns(UserWarning, match="slower: unsupported dtype float64"):
        window_attention(qkv, table, 4)


@pytest.mark.parametrize("implementation", ["reference", "sdpa", "triton"])
def test_a_cuda_graph_replays_with_new_inputs(implementation: str) -> None:
    qkv, table = torch.randn(1, 32, 32, 180, device="cuda"), torch.randn(961, 2, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        window_attention(qkv, table, 16, 8, implementation)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        out = window_attention(qkv, table, 16, 8, implementation)
    for _ in range(2):
        with torch.inference_mode():
            qkv.normal_()
        graph.replay()
        expected = reference.window_attention(qkv.double(), table.double(), 16, 8)
        assert (out.double() - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_inductor_compiles_training_without_graph_breaks() -> None:
    qkv = torch.randn(1, 32, 32, 180, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(961, 2, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def block(qkv: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(window_attention(qkv * 2, table, 16, 8))

    compiled, eager = torch.compile(block, fullgraph=True)(qkv, table), block(qkv, table)
    found = (compiled, *torch.autograd.grad(compiled.square().sum(), (qkv, table)))
    expected = (eager, *torch.autograd.grad(eager.square().sum(), (qkv, table)))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
