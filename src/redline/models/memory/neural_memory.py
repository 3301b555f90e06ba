"""Neural memory: a layer with one matrix per head that every token updates, by the gated delta rule or the Titans rule.

Queries, keys and values pass a short causal convolution; queries and keys are normalized to unit length; the values
that are read from the matrices are normalized and multiplied by a sigmoid gate. The state does not grow with the
text: it holds the matrices and the last inputs of the convolution.

Shapes: B sequences of S tokens, width D; H heads with keys of K and values of V channels; C = H · (2K + V);
T taps of the convolution.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.models.memory.config import TitanConfig
from redline.models.memory.token_positions import TokenPositions
from redline.nn.linear import Linear
from redline.nn.switchable import DispatchedModule
from redline.ops.convolved_heads import convolved_heads
from redline.ops.convolved_heads.reference import convolved
from redline.ops.gated_delta_rule import gated_delta_rule
from redline.ops.memory_step import Learned, Projected, memory_step
from redline.ops.titans_memory import TitansState, titans_memory

_SLOWEST_DECAY, _FASTEST_DECAY = 0.001, 0.1
# The initial bias of the forgetting gate. With this bias each token erases less than 1% of the memory. The momentum
# gate has no bias, so it starts at one half.
_FORGETTING_BIAS = -5.0
# The largest sum of a chunk's step sizes, including momentum. All steps of a chunk use the gradient at its start, so if
# all keys are equal, the steps add up: with a sum of 2 or more, they overshoot by at least the error, and the memory
# diverges.
_LARGEST_CORRECTION = 1.5

# Queries (B, S, H, K), keys (B, S, H, K) and values (B, S, H, V).
Heads = tuple[Tensor, Tensor, Tensor]
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
        self, x_BSD: Tensor, heads: Heads, state: Tensor, documents_BS: Tensor | None, implementation: str
    ) -> tuple[Tensor, Tensor]:
        # Computed in at least fp32, because the decay of a token is small and accumulates over thousands of tokens.
        exact = torch.promote_types(x_BSD.dtype, torch.float32)
        # -softplus(x) = logsigmoid(-x). F.softplus is avoided because torch.compile expects other strides of its
        # gradient than it has (torch 2.13), which broke the backward pass of a compiled block on the CPU.
        negative_speed_BSH = F.logsigmoid(-(self.decay(x_BSD).to(exact) + self.decay_bias.to(exact)))
        g_BSH, beta_BSH = self.log_rate.to(exact).exp() * negative_speed_BSH, self.strength(x_BSD).sigmoid()
        return gated_delta_rule(*heads, g_BSH, beta_BSH, state, documents_BS, self.chunk, implementation)


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
        self, x_BSD: Tensor, heads: Heads, state: TitansState, documents_BS: Tensor | None, implementation: str
    ) -> tuple[Tensor, TitansState]:
        exact = torch.promote_types(x_BSD.dtype, torch.float32)
        forgetting, momentum, step = self.gates(x_BSD).to(exact).unflatten(-1, (3, self.heads)).unbind(-2)
        alpha_BSH, eta_BSH = (forgetting + self.forgetting_bias.to(exact)).sigmoid(), momentum.sigmoid()
        theta_BSH = _LARGEST_CORRECTION / self.chunk * (1 - eta_BSH) * step.sigmoid()
        gates = (alpha_BSH, eta_BSH, theta_BSH)
        return titans_memory(*heads, *gates, state, documents_BS, self.chunk, implementation)


UPDATES = {"gated_delta": GatedDelta, "titans": Titans}


@dataclass(frozen=True)
class NeuralState:
    """The state of a layer. `recent_BTC` holds the last inputs of the convolution, which the next tokens need."""

    recent_BTC: Tensor
    memory: UpdateState


class NeuralMemory(DispatchedModule):
    # Unlike other modules this one does not default to "reference", which would make training on a GPU very slow.
    implementation = "auto"

    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim = config.neural_heads, config.key_dim, config.value_dim
        channels = self.heads * (2 * self.key_dim + self.value_dim)
        self.query_key_value = Linear(config.width, channels, bias=False)
        self.convolution = new_taps(config.convolution, channels)
        self.op = config.memory_update
        self.update = UPDATES[config.memory_update](config.width, self.heads, config.memory_chunk)
        self.gate = Linear(config.width, self.heads * self.value_dim, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=config.norm_eps)
        self.out = Linear(self.heads * self.value_dim, config.width, bias=False)

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> NeuralState:
        taps, channels = self.convolution.shape
        recent = torch.zeros(batch, taps - 1, channels, device=device, dtype=dtype)
        number = torch.promote_types(dtype, torch.float32)
        return NeuralState(recent, self.update.new_state(batch, self.key_dim, self.value_dim, device, number))

    def forward(
        self, x_BSD: Tensor, positions: TokenPositions, state: NeuralState | None = None
    ) -> tuple[Tensor, NeuralState, None]:
        """`state` belongs to the first token's document, the returned state to the last token's document."""
        documents_BS = positions.documents_BS
        if state is None:
            state = self.new_state(len(x_BSD), x_BSD.device, x_BSD.dtype)
        if x_BSD.shape[1] == 1 and isinstance(self.update, GatedDelta) and not torch.is_grad_enabled():
            return self._token(x_BSD, state, self.update)
        given = self.query_key_value(x_BSD)
        before = state.recent_BTC.to(given.dtype)
        heads = convolved_heads(
            given, self.convolution, before, self.heads, self.key_dim, documents_BS, self.implementation
        )
        recent = next_inputs(given, before, documents_BS)
        read, memory = self.update(x_BSD, heads, state.memory, documents_BS, self.implementation)
        gated = self.norm(read) * self.gate(x_BSD).unflatten(-1, (self.heads, -1)).sigmoid()
        return self.out(gated.flatten(-2)), NeuralState(recent, memory), None

    def _token(self, x_B1D: Tensor, state: NeuralState, update: GatedDelta) -> tuple[Tensor, NeuralState, None]:
        """Processes one token per sequence, as in decoding; on a GPU, one kernel does all but the projections."""
        x_BD = x_B1D[:, 0]
        projections = (self.query_key_value, update.decay, update.strength, self.gate)
        token = Projected(*(projection(x_BD) for projection in projections))
        learned = Learned(self.convolution, update.decay_bias, update.log_rate, self.norm.weight)
        assert isinstance(state.memory, Tensor) and self.norm.eps is not None
        gated, *after = memory_step(token, learned, state.recent_BTC, state.memory, self.norm.eps, self.implementation)
        return self.out(gated)[:, None], NeuralState(*after), None


def new_taps(count: int, channels: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, channels).uniform_(-(count**-0.5), count**-0.5))


def short_convolution(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the convolution's output and the inputs that it needs again for the next tokens."""
    return convolved(x_BSC, taps_TC, recent_BTC, documents_BS), next_inputs(x_BSC, recent_BTC, documents_BS)


def next_inputs(x_BSC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """Returns the last inputs, which the next tokens' convolution needs; those of earlier documents become zeros."""
    (length, count), recent_BTC = (x_BSC.shape[1], recent_BTC.shape[1]), recent_BTC.to(x_BSC.dtype)
    # `cat` copies: a view of `x_BSC` would keep the inputs of all tokens in memory as long as the state exists.
    held = torch.cat((recent_BTC[:, length:], x_BSC[:, max(0, length - count) :]), 1)
    if documents_BS is None:
        return held
    documents_BS = torch.cat((documents_BS[:, :1].expand(-1, count), documents_BS), 1)
    return held * (documents_BS[:, length:] == documents_BS[:, -1:]).unsqueeze(-1)
