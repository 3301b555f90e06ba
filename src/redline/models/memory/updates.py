"""The two update rules of neural memory, each with its learned gates.

Shapes: B sequences of S tokens, width D; H heads with keys of K and values of V channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.nn.linear import Linear
from redline.ops.gated_delta_rule import gated_delta_rule
from redline.ops.titans_memory import TitansState, titans_memory

_SLOWEST_DECAY, _FASTEST_DECAY = 0.001, 0.1
# At initialization little is forgotten and half of the momentum is kept.
_FORGETTING_BIAS = -5.0
# The largest sum of the steps of a chunk whose keys are all equal, momentum included. All steps of a chunk use the
# gradient at its start, so with a sum of 2 or more they overshoot by at least the error, and the memory diverges.
_LARGEST_CORRECTION = 1.5

UpdateState = Tensor | TitansState


class GatedDelta(nn.Module):
    """The gated delta rule: corrects the value stored under a key, and decays all values at a learned rate."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.decay = Linear(width, heads, bias=False)
        self.strength = Linear(width, heads, bias=False)
        self.log_rate = nn.Parameter(torch.zeros(heads))
        # At initialization the decay rates of the heads are spaced evenly on a log scale.
        speed = _SLOWEST_DECAY * (_FASTEST_DECAY / _SLOWEST_DECAY) ** (torch.arange(heads) / max(1, heads - 1))
        self.decay_bias = nn.Parameter(torch.log(torch.expm1(speed)))

    def new_state(self, batch: int, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch, len(self.log_rate), key_dim, value_dim, device=device, dtype=dtype)

    def forward(
        self,
        x_BSD: Tensor,
        query_BSHK: Tensor,
        key_BSHK: Tensor,
        value_BSHV: Tensor,
        state: Tensor,
        documents_BS: Tensor | None,
        implementation: str,
    ) -> tuple[Tensor, Tensor]:
        # At least fp32, because the decay of a token is small and accumulates over thousands of tokens.
        exact = torch.promote_types(x_BSD.dtype, torch.float32)
        # -softplus(x) = logsigmoid(-x). F.softplus is avoided because its traced gradient has other strides than the
        # computed one (torch 2.13), which broke the backward pass of a compiled block on the CPU.
        negative_speed_BSH = F.logsigmoid(-(self.decay(x_BSD).to(exact) + self.decay_bias.to(exact)))
        g_BSH, beta_BSH = self.log_rate.to(exact).exp() * negative_speed_BSH, self.strength(x_BSD).sigmoid()
        return gated_delta_rule(
            query_BSHK, key_BSHK, value_BSHV, g_BSH, beta_BSH, state, documents_BS, self.chunk, implementation
        )


class Titans(nn.Module):
    """The Titans update: gradient descent from the memory at the chunk's start, with momentum and forgetting."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.gates = Linear(width, 3 * heads, bias=False)
        self.forgetting_bias = nn.Parameter(torch.full((heads,), _FORGETTING_BIAS))

    def new_state(
        self, batch: int, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype
    ) -> TitansState:
        def nothing() -> Tensor:
            return torch.zeros(batch, self.heads, key_dim, value_dim, device=device, dtype=dtype)

        return TitansState(nothing(), nothing(), nothing(), torch.zeros(batch, dtype=torch.int32, device=device))

    def forward(
        self,
        x_BSD: Tensor,
        query_BSHK: Tensor,
        key_BSHK: Tensor,
        value_BSHV: Tensor,
        state: TitansState,
        documents_BS: Tensor | None,
        implementation: str,
    ) -> tuple[Tensor, TitansState]:
        exact = torch.promote_types(x_BSD.dtype, torch.float32)
        forgetting, momentum, step = self.gates(x_BSD).to(exact).unflatten(-1, (3, self.heads)).unbind(-2)
        alpha_BSH, eta_BSH = (forgetting + self.forgetting_bias.to(exact)).sigmoid(), momentum.sigmoid()
        theta_BSH = _LARGEST_CORRECTION / self.chunk * (1 - eta_BSH) * step.sigmoid()
        return titans_memory(
            query_BSHK, key_BSHK, value_BSHV, alpha_BSH, eta_BSH, theta_BSH, state, documents_BS, self.chunk,
            implementation,
        )  # fmt: skip


UPDATES = {"gated_delta": GatedDelta, "titans": Titans}
