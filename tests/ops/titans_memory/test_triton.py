"""Tests the Triton kernels, each alone and all together, on a GPU or interpreted on a CPU.

TRITON_INTERPRET must be set before Triton is imported.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.ops.titans_memory import TitansState, reference

triton = pytest.importorskip("redline.ops.titans_memory.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]
Make = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
WRITTEN = {
    "gate_kernel": ("gain", "momentum_gain", "of_memory", "of_momentum", "products", "last", "whole"),
    "state_kernel": (
        "memories", "momenta", "anchors", "errors", "final_memory", "final_momentum", "final_anchor",
    ),
    "output_kernel": ("out",),
    "local_grad_kernel": ("grad_local",),
    "state_grad_kernel": (
        "grad_v", "grad_memories", "grad_momenta", "grad_memory", "grad_momentum", "grad_anchor",
    ),
    "query_grad_kernel": ("grad_q", "grad_gain", "grad_of_memory", "grad_of_momentum"),
    "key_grad_kernel": ("grad_k", "grad_last", "grad_whole"),
    "gate_grad_kernel": ("grad_keep", "grad_eta", "grad_theta"),
}  # fmt: skip
# The tensors with the dtype of the inputs; all others are fp32.
ROUNDED = {"q", "k", "v", "errors", "out", "grad_out", "grad_local", "grad_v", "grad_q", "grad_k"}
ROUNDED |= {"memories", "momenta", "anchors", "grad_memories", "grad_momenta"}
# All checks except that of dynamic shapes, which takes long.
OPERATOR_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
CASES = [(name, torch.float32, 23, 16, 24, 16, True) for name in WRITTEN]
CASES += [
    (name, torch.float32, 18, 16, 16, 16, False) for name in ("state_kernel", "state_grad_kernel", "key_grad_kernel")
]
if DEVICE == "cuda":
    SIZES = [
        (dtype, 150, 64, 64, 64, cut) for dtype in (torch.float32, torch.float16, torch.bfloat16) for cut in (0, 1)
    ]
    SIZES += [(torch.bfloat16, 150, 128, 128, 64, True), (torch.bfloat16, 150, 96, 64, 32, False)]
    CASES += [(name, *size) for size in SIZES for name in WRITTEN]


def operands(
    inputs: Make, dtype: torch.dtype, tokens: int, keys: int, values: int, chunk: int, cut: bool
) -> dict[str, Tensor | None]:
    """Returns the inputs of the op by name."""
    caught: dict[str, Tensor | None] = {}

    def catch(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        names = ("q", "k", "v", "keep", "eta", "theta", "memory", "momentum", "anchor", "wrap", "fresh")
        caught.update(zip(names, arguments[:-1], strict=True))
        state = torch.zeros(1, 1, 1, 1, device=DEVICE)
        return arguments[2], state, state, state

    tensors, state, documents = inputs(1 if DEVICE == "cpu" else 2, tokens, 2, keys, values, chunk, cut, cut)
    tensors = [one.to(DEVICE, dtype) for one in tensors]
    state = None if state is None else TitansState(*(one.to(DEVICE) for one in state))
    documents = None if documents is None else documents.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_forward", catch)
        triton.titans_memory(*tensors, state, documents, chunk)
    return caught


@pytest.mark.parametrize(("name", "dtype", "tokens", "keys", "values", "chunk", "cut"), CASES)
def test_each_kernel_agrees_with_its_definition(
    inputs: Make,
    stages: Make,
    name: str,
    dtype: torch.dtype,
    tokens: int,
    keys: int,
    values: int,
    chunk: int,
    cut: bool,
) -> None:
    given = operands(inputs, dtype, tokens, keys, values, chunk, cut)
    start = triton.launcher(given["q"], given["v"], given["wrap"], chunk)
    batch, heads = start.states[:2]
    finals = {f"grad_final_{one}": torch.randn(batch, heads, keys, values) for one in ("memory", "momentum", "anchor")}
    grads = {one: grad.to(DEVICE) for one, grad in finals.items()}
    exact = stages(given, grads | {"grad_out": torch.randn_like(given["v"])}, chunk, start.options["SPLIT"])
    kernel = getattr(triton.forward, name, None) or getattr(triton.backward, name)
    arguments: list[Tensor | None] = []
    for argument in kernel.arg_names[: kernel.arg_names.index("tokens")]:
        value = exact[argument]
        if argument in WRITTEN[name] and value is None:
            value = torch.zeros(batch, heads, keys, values, device=DEVICE)
        if value is not None and value.is_floating_point():
            value = value.detach().to(dtype if argument in ROUNDED else torch.float32).contiguous()
        arguments.append(torch.empty_like(value) if argument in WRITTEN[name] else value)
    start(kernel, *arguments)
    for argument, found in zip(kernel.arg_names, arguments, strict=False):
        if argument not in WRITTEN[name] or exact[argument] is None or (argument == "anchors" and not cut):
            continue
        expected = exact[argument].double()
        # Rows past the end of a chunk are not written.
        found = (
            torch.where(expected == 0, 0, found.double()) if argument in ("gain", "momentum_gain") else found.double()
        )
        # Gates of zero can erase everything from before a chunk.
        error = ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        limit = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
        assert error <= limit, f"{argument} is off by {error:.2e}, and {limit:.2e} would be rounding"


@pytest.mark.parametrize(("tokens", "cut"), [(18, False), (16, False), (20, True)])
def test_agrees_with_the_reference(agrees: Agrees, inputs: Make, tokens: int, cut: bool) -> None:
    tensors, state, documents = inputs(1, tokens, 1, 8, 16, 16, carried=cut, packed=cut)
    documents = documents if documents is None else documents.to(DEVICE)

    def flat(form: Callable[..., tuple[Tensor, TitansState]], *given: Tensor) -> tuple[Tensor, ...]:
        before = None if state is None else TitansState(*given[6:], state.position_B.to(DEVICE))
        o, after = form(*given[:6], before, documents, 16)
        assert after.position_B.dtype == torch.int32
        return o, *after[:3], after.position_B.double()

    given = [*tensors, *(() if state is None else state[:3])]
    agrees(
        lambda *one: flat(triton.titans_memory, *one),
        lambda *one: flat(reference.recurrent, *one),
        given,
        device=DEVICE,
    )


def test_passes_opcheck(inputs: Make) -> None:
    q, k, v, *gates = (one.to(DEVICE).requires_grad_() for one in inputs(1, 2, 1, 16, 16, 16)[0])
    gates = [one.detach().transpose(1, 2).contiguous().requires_grad_() for one in gates]
    arguments = (q, k, v, *gates, None, None, None, None, None, 16)
    torch.library.opcheck(triton._forward, arguments, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize(
    ("dtype", "keys", "chunk", "sentence"),
    [
        (torch.float64, 4, 64, "unsupported dtype float64"),
        (torch.float32, 129, 64, "heads may have at most 128 elements, not 129"),
        (torch.float32, 4, 8, "unsupported chunk 8 (supported: 16, 32, 64)"),
    ],
)
def test_unsupported_inputs_are_refused(dtype: torch.dtype, keys: int, chunk: int, sentence: str) -> None:
    q = torch.zeros(1, 3, 1, keys, device=DEVICE, dtype=dtype)
    assert sentence in triton.why_not(q, q, q, chunk)


def test_too_many_tokens_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, 2_097_089, 1, 1)
    assert "at most 2097088 tokens per call are supported, not 2097089" in triton.why_not(q, q, q, 64)
