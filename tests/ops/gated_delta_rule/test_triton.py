"""Tests the Triton kernels, each alone and all together, on a GPU or interpreted on a CPU.

TRITON_INTERPRET must be set before Triton is imported.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from redline.ops.gated_delta_rule import gated_delta_rule, reference

triton = pytest.importorskip("redline.ops.gated_delta_rule.triton")
DEVICE = "cpu" if triton.kernel.INTERPRETED else "cuda"
Agrees = Callable[..., None]
Make = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    not triton.kernel.INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
# The tensors that each kernel writes; values per token and final states are always fp32.
WRITTEN = {
    "inverse_kernel": ("decay", "inverse"),
    "solve_kernel": ("w", "u"),
    "state_kernel": ("states", "corrections", "final"),
    "output_kernel": ("out",),
    "local_grad_kernel": ("grad_local",),
    "state_grad_kernel": ("grad_correction", "grad_states", "grad_initial"),
    "query_grad_kernel": ("grad_q", "grad_q_decay"),
    "key_grad_kernel": ("grad_k_part", "grad_w", "grad_k_decay"),
    "right_grad_kernel": ("grad_v_right", "grad_k_right"),
    "system_grad_kernel": ("grad_k", "grad_v", "grad_g", "grad_beta"),
}
# All checks except that of dynamic shapes, which takes long.
OPERATOR_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
FP32 = {"g", "beta", "decay", "initial", "final", "grad_final", "grad_initial", "grad_g", "grad_beta"}
FP32 |= {"grad_q_decay", "grad_k_decay"}
# Without documents, so that the first tokens of a chunk affect its last ones.
SMALL, LARGER = (torch.float32, 37, 16, 24, 16, True), (torch.float16, 70, 24, 16, 64, False)
CASES = [(name, *SMALL) for name in WRITTEN] + [(name, *LARGER) for name in ("inverse_kernel", "system_grad_kernel")]
if DEVICE == "cuda":
    BF16 = torch.bfloat16
    SIZES = [(dtype, 150, 64, 64, 64, packed) for dtype in (torch.float32, torch.float16, BF16) for packed in (0, 1)]
    SIZES += [(BF16, 150, 128, 128, 64, False), (BF16, 150, 96, 96, 64, True), (BF16, 90, 256, 256, 64, False)]
    SIZES += [(BF16, 150, 64, 128, 32, False), (BF16, 150, 128, 64, 16, False), (torch.float32, 90, 128, 96, 64, False)]
    CASES = [(name, *size) for size in (SMALL, LARGER, *SIZES) for name in WRITTEN]


@pytest.mark.parametrize(("name", "dtype", "tokens", "keys", "values", "chunk", "packed"), CASES)
def test_each_kernel_agrees_with_its_definition(
    inputs: Make,
    stages: Make,
    name: str,
    dtype: torch.dtype,
    tokens: int,
    keys: int,
    values: int,
    chunk: int,
    packed: bool,
) -> None:
    *tensors, documents = inputs(1 if DEVICE == "cpu" else 3, tokens, 2, keys, values, True, packed)
    tensors = [*(one.to(DEVICE, dtype) for one in tensors), documents.to(DEVICE) if packed else None]
    start = triton.launcher(tensors[0], tensors[2], tensors[6], chunk)
    grad_out, grad_final = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    exact = stages(tensors, grad_out, grad_final, start.tiles.chunk)
    kernel = getattr(triton.forward, name, None) or getattr(triton.backward, name)
    arguments: list[Tensor | None] = []
    for argument in kernel.arg_names[: kernel.arg_names.index("tokens")]:
        value = exact[argument]
        if value is not None and value.is_floating_point():
            value = value.detach().to(torch.float32 if argument in FP32 else dtype).contiguous()
        arguments.append(torch.empty_like(value) if argument in WRITTEN[name] else value)
    start(kernel, *arguments)
    for argument, found in zip(kernel.arg_names, arguments, strict=False):
        if argument in WRITTEN[name]:
            expected = exact[argument]
            error = ((found.double() - expected).norm() / expected.norm()).item()
            # fp32 sums of rounded inputs have the error of the inputs.
            limit = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
            assert error <= limit, f"{argument} is off by {error:.2e}, and {limit:.2e} would be rounding"


def whole(documents: Tensor | None, chunk: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    *given, state = (*tensors, None)[:6]
    return triton.gated_delta_rule(*given, state, documents, chunk=chunk)


def definition(documents: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    *given, state = (*tensors, None)[:6]
    return reference.recurrent(*given, state, documents)


@pytest.mark.parametrize(
    ("tokens", "keys", "values", "chunk", "carried", "packed"),
    [(33, 16, 24, 16, True, True), (1, 5, 3, 16, True, False), (35, 20, 16, 32, False, False)],
)
def test_agrees_with_the_reference(
    agrees: Agrees, inputs: Make, tokens: int, keys: int, values: int, chunk: int, carried: bool, packed: bool
) -> None:
    *tensors, documents = inputs(1, tokens, 1, keys, values, carried, packed)
    documents = None if documents is None else documents.to(DEVICE)
    given = [one for one in tensors if one is not None]
    agrees(partial(whole, documents, chunk), partial(definition, documents), given, device=DEVICE)


def test_takes_dtypes_that_differ_and_any_strides() -> None:
    q = torch.randn(2, 8, 20, 2, device=DEVICE, dtype=torch.float16).permute(0, 2, 3, 1) * 0.3
    k, v, g, beta = (
        q.flip(1) * 0.5,
        torch.randn(2, 20, 2, 8, device=DEVICE),
        -torch.rand_like(q[..., 0]),
        q[..., 1].abs(),
    )
    documents = torch.zeros(2, 20, dtype=torch.int64, device=DEVICE)
    found = gated_delta_rule(q, k, v, g, beta, None, documents, chunk=16, implementation="triton")
    expected = reference.recurrent(*(one.double() for one in (q, k, v, g, beta)))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and (one - other).norm() <= 1e-5 * other.norm()


def test_the_final_state_alone_has_gradients(inputs: Make) -> None:
    tensors = [one.to(DEVICE).requires_grad_() for one in inputs(1, 9, 1, 16, 16)[:5]]
    grads = [
        torch.autograd.grad(run(*tensors)[1].square().sum(), tensors[1:])
        for run in (triton.gated_delta_rule, reference.chunked)
    ]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_works_with_activation_checkpointing(inputs: Make) -> None:
    """Activation checkpointing unpacks saved tensors only once."""
    tensors = [one.to(DEVICE).requires_grad_() for one in inputs(1, 9, 1, 16, 16)[:5]]

    def run(*given: Tensor) -> Tensor:
        return triton.gated_delta_rule(*given)[0].square().sum()

    grads = torch.autograd.grad(checkpoint(run, *tensors, use_reentrant=False), tensors)
    for one, other in zip(grads, torch.autograd.grad(run(*tensors), tensors), strict=True):
        assert torch.equal(one, other)


def test_passes_opcheck(inputs: Make) -> None:
    q, k, v, g, beta, state, documents = (one.to(DEVICE) for one in inputs(1, 5, 1, 16, 16, True, True))
    given = [one.requires_grad_() for one in (q, k, v, g.mT.contiguous(), beta.mT.contiguous(), state)]
    torch.library.opcheck(triton._forward, (*given, documents, 16), test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize(
    ("dtype", "keys", "chunk", "sentence"),
    [
        (torch.float64, 4, 64, "unsupported dtype float64"),
        (torch.float32, 257, 64, "heads may have at most 256 elements, not 257"),
        (torch.float32, 4, 8, "unsupported chunk 8 (supported: 16, 32, 64)"),
    ],
)
def test_unsupported_inputs_are_refused(dtype: torch.dtype, keys: int, chunk: int, sentence: str) -> None:
    q = torch.zeros(1, 3, 1, keys, device=DEVICE, dtype=dtype)
    assert sentence in triton.why_not(q, q, q, chunk)


def test_too_many_tokens_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, 4_194_241, 1, 1)
    assert "at most 4194240 tokens per call are supported, not 4194241" in triton.why_not(q, q, q, 64)
