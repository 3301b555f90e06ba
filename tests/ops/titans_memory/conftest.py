"""Inputs and the expected tensors of every kernel of the Titans memory.

The stages are computed in fp64, one sequence and chunk at a time, and differentiated by autograd, without any formula
of the kernels' backward pass.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.ops.titans_memory import TitansState
from redline.ops.titans_memory.reference import _products


@pytest.fixture
def inputs() -> Callable[..., tuple[list[Tensor], TitansState | None, Tensor | None]]:
    """Returns q, k, v, alpha, eta and theta (some gates are 0, some 1), a state, and documents."""

    def make(
        batch: int,
        tokens: int,
        heads: int,
        keys: int,
        values: int,
        chunk: int,
        carried: bool = False,
        packed: bool = False,
    ) -> tuple[list[Tensor], TitansState | None, Tensor | None]:
        q, k = (F.normalize(torch.randn(batch, tokens, heads, keys), dim=-1) for _ in range(2))
        v = torch.randn(batch, tokens, heads, values)
        gates = [torch.rand(batch, tokens, heads).mul(1.2).sub(0.1).clamp(0, 1) for _ in range(3)]
        state = None
        if carried:
            matrices = (torch.randn(batch, heads, keys, values) for _ in range(3))
            state = TitansState(*matrices, torch.randint(chunk, (batch,), dtype=torch.int32))
        documents = (torch.rand(batch, tokens) < 0.03).cumsum(1).int() if packed else None
        return [q, k, v, *gates], state, documents

    return make


@pytest.fixture
def stages() -> Callable[..., dict[str, Tensor | None]]:
    """Returns every tensor that the kernels read or write in fp64, under the names of the kernels' arguments."""

    def compute(
        given: dict[str, Tensor | None], grads: dict[str, Tensor], C: int, split: int
    ) -> dict[str, Tensor | None]:
        """`given` holds the inputs of the op; `grads` holds grad_out and the gradients of the three final states."""
        names = ("q", "k", "v", "keep", "eta", "theta", "memory", "momentum", "anchor")
        exact = {name: given[name].double().requires_grad_() for name in names if given[name] is not None}
        q, k, v, *gates = (exact[name] for name in names[:6])
        batch, tokens, heads, keys = q.shape
        chunks = split * -(-tokens // C)
        first = [exact.get(name, q.new_zeros(batch, heads, keys, v.shape[-1])) for name in names[6:]]
        parts: dict[str, list[list[Tensor]]] = {}
        rows: dict[str, list[Tensor]] = {"errors": [], "out": [], "grad_local": []}
        numbers: dict[str, list[Tensor]] = {"of_memory": [], "of_momentum": [], "products": []}
        loss, ends = q.new_zeros(()), []
        for b in range(batch):
            M, S, A = (matrix[b] for matrix in first)
            for index in range(chunks):
                begin, end = index // split * C, min((index // split + 1) * C, tokens)
                if split == 2:
                    wrap = int(given["wrap"][b, index // 2])
                    cut = min(wrap, end)
                    begin, end = (cut, end) if index % 2 else (begin, cut)
                    A = M if index % 2 and wrap <= tokens else A
                else:
                    A = M
                A = A.clone()
                keep, eta, theta = (gate[b, :, begin:end] for gate in gates)
                (L_a, a), (L_m, m) = _products(keep), _products(eta)
                s = L_m * theta[:, None, :]
                G, f = L_a @ s, (L_a @ m[..., None])[..., 0]
                # Separate autograd nodes, so that each has a gradient.
                gain, of_memory, of_momentum = G.clone(), a.clone(), f.clone()
                empty = torch.zeros(heads, 0, dtype=M.dtype, device=M.device, requires_grad=True)
                last = torch.stack((G[:, -1], s[:, -1]), 1) if end > begin else torch.stack((empty, empty), 1)
                ones = M.new_tensor([1.0, 0.0, 1.0]).expand(heads, 3)
                whole = torch.stack((a[:, -1], f[:, -1], m[:, -1]), 1) if end > begin else ones.clone().requires_grad_()
                Q, K, V = (tensor[b, begin:end].transpose(0, 1) for tensor in (q, k, v))
                old = torch.ones(end - begin) if split == 1 else 1 - given["fresh"][b, begin:end].cpu()
                D = V - old.to(V)[:, None] * (K @ A)
                out = of_memory[..., None] * (Q @ M) + of_momentum[..., None] * (Q @ S) + ((Q @ K.mT) * gain) @ D
                grad = grads["grad_out"][b, begin:end].transpose(0, 1).double()
                loss = loss + (out * grad).sum()
                found = {"gain": gain, "momentum_rows": s, "last": last, "whole": whole}
                found |= {"memories": M, "momenta": S, "anchors": A}
                M, S = (
                    whole[:, 0, None, None] * M + whole[:, 1, None, None] * S + (last[:, 0, :, None] * K).mT @ D,
                    whole[:, 2, None, None] * S + (last[:, 1, :, None] * K).mT @ D,
                )
                found |= {"memory_ends": M, "momentum_ends": S, "of": of_memory, "of_m": of_momentum, "D": D}
                for name, value in found.items():
                    parts.setdefault(name, [[] for _ in range(batch)])[b].append(value)
                rows["errors"].append(D.transpose(0, 1))
                rows["out"].append(out.transpose(0, 1))
                rows["grad_local"].append((((Q @ K.mT) * gain).mT @ grad).transpose(0, 1))
                for name, value in (("of_memory", of_memory), ("of_momentum", of_momentum), ("products", m)):
                    numbers[name].append(value)
            ends.append((M, S, A))
            for final, name in zip((M, S, A), ("memory", "momentum", "anchor"), strict=True):
                loss = loss + (final * grads[f"grad_final_{name}"][b].double()).sum()

        def gradient(*tensors: Tensor) -> list[Tensor]:
            return [
                torch.zeros_like(one) if grad is None else grad
                for one, grad in zip(
                    tensors, torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True), strict=True
                )
            ]

        def stacked(name: str, of: Callable[..., list[Tensor]] | None = None) -> Tensor:
            """Returns (B, H, chunks, …), padded with zeros to whole chunks."""
            flat = [one for line in parts[name] for one in line]
            flat = of(*flat) if of else flat
            if name in ("gain", "momentum_rows"):
                flat = [F.pad(one, (0, C - one.shape[-1], 0, C - one.shape[-1])) for one in flat]
            if name == "last":
                flat = [F.pad(one, (0, C - one.shape[-1])) for one in flat]
            return torch.stack(flat).unflatten(0, (batch, chunks)).transpose(1, 2)

        def joined(pieces: list[Tensor], dimension: int) -> Tensor:
            return torch.stack([torch.cat(pieces[b * chunks : (b + 1) * chunks], dimension) for b in range(batch)])

        named: dict[str, Tensor | None] = {name: joined(pieces, 0) for name, pieces in rows.items()}
        named |= {name: joined(pieces, 1) for name, pieces in numbers.items()}
        flat = {name: [one for line in parts[name] for one in line] for name in ("of", "of_m", "D")}
        named["grad_of_memory"] = joined(gradient(*flat["of"]), 1)
        named["grad_of_momentum"] = joined(gradient(*flat["of_m"]), 1)
        named["grad_v"] = joined([grad.transpose(0, 1) for grad in gradient(*flat["D"])], 0)
        for name in ("gain", "last", "whole", "memories", "momenta", "anchors"):
            named[name] = stacked(name)
        named["momentum_gain"] = stacked("momentum_rows")
        for name, of in (("gain", "grad_gain"), ("last", "grad_last"), ("whole", "grad_whole")):
            named[of] = stacked(name, gradient)
        named |= {
            "grad_memories": stacked("memory_ends", gradient),
            "grad_momenta": stacked("momentum_ends", gradient),
        }
        for index, name in enumerate(("memory", "momentum", "anchor")):
            named[f"final_{name}"] = torch.stack([end[index] for end in ends])
            named[name] = given[name]
            named[f"grad_{name}"] = gradient(first[index])[0] if first[index].requires_grad else None
        leaves = ("q", "k", "keep", "eta", "theta")
        named |= {
            f"grad_{name}": grad for name, grad in zip(leaves, gradient(*(exact[x] for x in leaves)), strict=True)
        }
        named |= {name: given[name] for name in ("q", "k", "v", "keep", "eta", "theta", "wrap", "fresh")}
        return named | grads

    return compute
