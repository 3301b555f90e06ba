"""Inputs and the expected tensors of every kernel of the gated delta rule.

The stages are computed in fp64 and differentiated by autograd, without any formula of the kernels.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.gated_delta_rule.reference import _document_masks, _in_chunks


@pytest.fixture
def inputs() -> Callable[..., list[Tensor | None]]:
    """Returns q, k, v, g, beta, a state and documents. Keys are similar, so that corrections depend on each other."""

    def make(
        batch: int, tokens: int, heads: int, keys: int, values: int, carried: bool = False, packed: bool = False
    ) -> list[Tensor | None]:
        common = torch.randn(batch, 1, heads, keys)
        q, k = (F.normalize(torch.randn(batch, tokens, heads, keys) + common, dim=-1) for _ in range(2))
        v = torch.randn(batch, tokens, heads, values)
        g, beta = -torch.rand(batch, tokens, heads) * 0.2, torch.rand(batch, tokens, heads)
        state = torch.randn(batch, heads, keys, values) if carried else None
        documents = (torch.rand(batch, tokens) < 0.08).cumsum(1).int() if packed else None
        return [q, k, v, g, beta, state, documents]

    return make


@pytest.fixture
def stages() -> Callable[..., dict[str, Tensor | None]]:
    """Returns every tensor that the kernels read or write in fp64, under the names of the kernels' arguments."""

    def compute(tensors: list[Tensor | None], grad_out: Tensor, grad_final: Tensor, C: int) -> dict[str, Tensor | None]:
        q, k, v, g, beta, initial, documents = (
            tensor.double() if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
        )
        grad_out, grad_final = grad_out.double(), grad_final.double()
        padding = -q.shape[1] % C
        same, carried = _document_masks(documents, q.shape[1], C, padding, q.device)
        q_, k_, v_, g_, beta_ = leaves = [
            _in_chunks(tensor, C, padding).requires_grad_() for tensor in (q, k, v, g, beta)
        ]
        S = torch.zeros_like(grad_final) if initial is None else initial
        first = S = S.clone().requires_grad_()
        c = g_.cumsum(-1)
        c_outside, c_system, k_outside, k_system = c.clone(), c.clone(), k_.clone(), k_.clone()
        pairs, pairs_system = (
            (one[..., :, None] - one[..., None, :]).masked_fill(~same, -torch.inf).exp()
            for one in (c_outside, c_system)
        )
        gamma, gamma_system = (one.masked_fill(~carried, -torch.inf).exp() for one in (c_outside, c_system))
        A = (beta_[..., None] * (k_system @ k_system.mT) * pairs_system).tril(-1)
        T = torch.linalg.inv(A + torch.eye(C, dtype=A.dtype, device=A.device))
        v_right, k_right = beta_[..., None] * v_, (beta_ * gamma_system)[..., None] * k_system
        U, W = T @ v_right, T @ k_right
        states, ends, corrections, outputs = [], [], [], []
        for n in range(q_.shape[2]):
            states.append(S)
            corrections.append(U[:, :, n] - W[:, :, n] @ S)
            scores = (q_[:, :, n] @ k_outside[:, :, n].mT) * pairs[:, :, n]
            outputs.append(gamma[:, :, n, :, None] * (q_[:, :, n] @ S) + scores @ corrections[-1])
            kept = pairs[:, :, n, -1, :, None] * k_outside[:, :, n]
            S = gamma[:, :, n, -1, None, None] * S + kept.mT @ corrections[-1]
            ends.append(S)
        out = torch.stack(outputs, 2)
        grad_chunks = _in_chunks(grad_out, C, padding)
        loss = (out * grad_chunks).sum() + (S * grad_final).sum()
        single = [*leaves, first, c_outside, k_outside, W, v_right, k_right]
        found = torch.autograd.grad(loss, [*single, *corrections, *ends])
        grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial, grad_c, k_part, grad_W, v_right, k_right = found[:11]
        grad_correction = torch.stack(found[11 : 11 + len(corrections)], 2)
        scores = (q_ @ k_.mT) * pairs
        named = {
            "inverse": T, "w": W, "u": U, "corrections": torch.stack(corrections, 2), "out": out,
            "grad_local": scores.mT @ grad_chunks, "grad_correction": grad_correction, "grad_q": grad_q,
            "grad_w": grad_W,
            "grad_k_part": k_part, "grad_v_right": v_right, "grad_k_right": k_right, "grad_k": grad_k, "grad_v": grad_v,
        }  # fmt: skip
        named = {name: value if name == "inverse" else _in_rows(value, padding) for name, value in named.items()}
        of_q = (q_ * grad_q).sum(-1)
        numbers = {"decay": c, "grad_g": grad_g, "grad_beta": grad_beta, "grad_q_decay": of_q}
        numbers |= {"grad_k_decay": grad_c - of_q, "g": g_, "beta": beta_}
        if padding:
            # Cumulative sums past the last token repeat the last one, so their gradients are added to it.
            numbers["grad_k_decay"][:, :, -1, C - padding - 1] += numbers["grad_k_decay"][:, :, -1, C - padding :].sum(
                -1
            )
        named |= {name: value.flatten(2)[..., : q.shape[1]] for name, value in numbers.items()}
        named |= {"states": torch.stack(states, 2), "grad_states": torch.stack(found[11 + len(corrections) :], 2)}
        named |= {"q": q, "k": k, "v": v, "initial": initial, "documents": documents, "final": S}
        return named | {"grad_out": grad_out, "grad_final": grad_final, "grad_initial": grad_initial}

    return compute


def _in_rows(tensor_BHNCX: Tensor, padding: int) -> Tensor:
    tensor_BSHX = tensor_BHNCX.flatten(2, 3).transpose(1, 2)
    return tensor_BSHX[:, : tensor_BSHX.shape[1] - padding]
