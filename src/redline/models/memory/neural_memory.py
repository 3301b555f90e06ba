"""Neural memory: a layer with one matrix per head that every token updates, by the gated delta rule or by Titans.

Queries, keys and values pass a short causal convolution; queries and keys are normalized to unit length; the values
read are normalized and multiplied by a sigmoid gate. The state does not grow with the text: it holds the matrices and
the last inputs of the convolution.

Shapes: B sequences of S tokens, width D; H heads with keys of K and values of V channels; C = H · (2K + V).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redline.models.memory.config import TitanConfig
from redline.models.memory.short_convolution import new_taps, next_inputs
from redline.models.memory.token_positions import TokenPositions
from redline.models.memory.updates import UPDATES, GatedDelta, UpdateState
from redline.nn.linear import Linear
from redline.nn.switchable import DispatchedModule
from redline.ops.convolved_heads import convolved_heads
from redline.ops.memory_step import Learned, Projected, memory_step


@dataclass(frozen=True)
class NeuralState:
    """`recent_BTC` holds the last inputs of the convolution, which the next tokens need."""

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
        """Takes the state of the first token's document and returns the state of the last token's document."""
        documents_BS = positions.documents_BS
        if state is None:
            state = self.new_state(len(x_BSD), x_BSD.device, x_BSD.dtype)
        if x_BSD.shape[1] == 1 and isinstance(self.update, GatedDelta) and not torch.is_grad_enabled():
            return self._token(x_BSD, state, self.update)
        given = self.query_key_value(x_BSD)
        before = state.recent_BTC.to(given.dtype)
        query, key, value = convolved_heads(
            given, self.convolution, before, self.heads, self.key_dim, documents_BS, self.implementation
        )
        recent = next_inputs(given, before, documents_BS)
        read, memory = self.update(x_BSD, query, key, value, state.memory, documents_BS, self.implementation)
        gated = self.norm(read) * self.gate(x_BSD).unflatten(-1, (self.heads, -1)).sigmoid()
        return self.out(gated.flatten(-2)), NeuralState(recent, memory), None

    def _token(self, x_B1D: Tensor, state: NeuralState, update: GatedDelta) -> tuple[Tensor, NeuralState, None]:
        """Processes one token per sequence, as in decoding; one kernel on a GPU."""
        x_BD = x_B1D[:, 0]
        projections = (self.query_key_value, update.decay, update.strength, self.gate)
        token = Projected(*(projection(x_BD) for projection in projections))
        learned = Learned(self.convolution, update.decay_bias, update.log_rate, self.norm.weight)
        assert isinstance(state.memory, Tensor) and self.norm.eps is not None
        gated, *after = memory_step(token, learned, state.recent_BTC, state.memory, self.norm.eps, self.implementation)
        return self.out(gated)[:, None], NeuralState(*after), None
