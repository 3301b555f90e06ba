"""What tests of the kernels of the gated delta rule share: inputs, and what every kernel should read and write.

The stages are written out in fp64, and autograd finds their gradients: no formula of the kernels is used.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.gated_delta_rule.reference import _borders, _in_chunks


@pytest.fixture
def inputs() -> Callable[..., list[Tensor | None]]:
    """q, k, v, g, beta, a state and documents; keys have much in common, so that corrections depend on each other."""

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
    """Every tensor that the kernels read or write, by the names they have there, in fp64."""

    def compute(tensors: list[Tensor | None], out_pull: Tensor, final_pull: Tensor, C: int) -> dict[str, Tensor | None]:
        q, k, v, g, beta, initial, documents = (
            tensor.double() if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
        )
        out_pull, final_pull = out_pull.double(), final_pull.double()
        padding = -q.shape[1] % C
        same, carried = _borders(documents, q.shape[1], C, padding, q.device)
        q_, k_, v_, g_, beta_ = leaves = [
            _in_chunks(tensor, C, padding).requires_grad_() for tensor in (q, k, v, g, beta)
        ]
        S = torch.zeros_like(final_pull) if initial is None else initial
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
        pull_ = _in_chunks(out_pull, C, padding)
        loss = (out * pull_).sum() + (S * final_pull).sum()
        single = [*leaves, first, c_outside, k_outside, W, v_right, k_right]
        found = torch.autograd.grad(loss, [*single, *corrections, *ends])
        q_pull, k_pull, v_pull, g_pull, beta_pull, initial_pull, c_pull, k_part, W_pull, v_right, k_right = found[:11]
        correction_pull = torch.stack(found[11 : 11 + len(corrections)], 2)
        scores = (q_ @ k_.mT) * pairs
        named = {
            "inverse": T, "w": W, "u": U, "corrections": torch.stack(corrections, 2), "out": out,
            "local_pull": scores.mT @ pull_, "correction_pull": correction_pull, "q_pull": q_pull, "w_pull": W_pull,
            "k_part_pull": k_part, "v_right_pull": v_right, "k_right_pull": k_right, "k_pull": k_pull, "v_pull": v_pull,
        }  # fmt: skip
        named = {name: value if name == "inverse" else _in_rows(value, padding) for name, value in named.items()}
        of_q = (q_ * q_pull).sum(-1)
        numbers = {"decay": c, "g_pull": g_pull, "beta_pull": beta_pull, "q_decay_pull": of_q}
        numbers |= {"k_decay_pull": c_pull - of_q, "g": g_, "beta": beta_}
        if padding:
            # All sums past the last token are the last one's: what they pull at, it does.
            numbers["k_decay_pull"][:, :, -1, C - padding - 1] += numbers["k_decay_pull"][:, :, -1, C - padding :].sum(
                -1
            )
        named |= {name: value.flatten(2)[..., : q.shape[1]] for name, value in numbers.items()}
        named |= {"states": torch.stack(states, 2), "state_pulls": torch.stack(found[11 + len(corrections) :], 2)}
        named |= {"q": q, "k": k, "v": v, "initial": initial, "documents": documents, "final": S}
        return named | {"out_pull": out_pull, "final_pull": final_pull, "initial_pull": initial_pull}

    return compute


def _in_rows(tensor_BHNCX: Tensor, padding: int) -> Tensor:
    tensor_BSHX = tensor_BHNCX.flatten(2, 3).transpose(1, 2)
    return tensor_BSHX[:, : tensor_BSHX.shape[1] - padding]
