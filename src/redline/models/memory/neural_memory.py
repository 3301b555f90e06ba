"""A layer whose memory is a matrix per head, rewritten by every token: the gated delta rule, or the Titans update.

Queries, keys and values pass a short causal convolution; queries and keys are made unit vectors; what is read is
normalised and passes a sigmoid gate. Its state does not grow with the text: the matrices, and the last tokens before
the convolution.

Shapes: B sequences of S tokens, width D; H heads with keys of K and values of V channels; C = H · (2K + V).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redline.models.memory.config import TitanConfig
from redline.models.memory.short_convolution import inputs_held, new_taps
from redline.models.memory.token_positions import Passage
from redline.models.memory.updates import UPDATES, GatedDelta, UpdateState
from redline.nn.dispatched import Dispatched
from redline.nn.linear import Linear
from redline.ops.convolved_heads import convolved_heads
from redline.ops.memory_step import Learned, Projected, memory_step


@dataclass(frozen=True)
class NeuralState:
    """`recent` are the inputs of the convolution that the next tokens still need."""

    recent_BTC: Tensor
    memory: UpdateState


class NeuralMemory(Dispatched):
    # Not plain by default, as other modules are: a GPU would train for days without a word about why.
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
        self, x_BSD: Tensor, passage: Passage, state: NeuralState | None = None
    ) -> tuple[Tensor, NeuralState, None]:
        """The state given belongs to the first token's document; the state returned to the last one's."""
        documents_BS = passage.documents_BS
        if state is None:
            state = self.new_state(len(x_BSD), x_BSD.device, x_BSD.dtype)
        if x_BSD.shape[1] == 1 and isinstance(self.update, GatedDelta) and not torch.is_grad_enabled():
            return self._token(x_BSD, state, self.update)
        given = self.query_key_value(x_BSD)
        before = state.recent_BTC.to(given.dtype)
        query, key, value = convolved_heads(
            given, self.convolution, before, self.heads, self.key_dim, documents_BS, self.implementation
        )
        recent = inputs_held(given, before, documents_BS)
        read, memory = self.update(x_BSD, query, key, value, state.memory, documents_BS, self.implementation)
        gated = self.norm(read) * self.gate(x_BSD).unflatten(-1, (self.heads, -1)).sigmoid()
        return self.out(gated.flatten(-2)), NeuralState(recent, memory), None

    def _token(self, x_B1D: Tensor, state: NeuralState, update: GatedDelta) -> tuple[Tensor, NeuralState, None]:
        """The same for one token, as decoding takes them: one kernel on a GPU."""
        x_BD = x_B1D[:, 0]
        projections = (self.query_key_value, update.decay, update.strength, self.gate)
        token = Projected(*(projection(x_BD) for projection in projections))
        learned = Learned(self.convolution, update.decay_bias, update.log_rate, self.norm.weight)
        assert isinstance(state.memory, Tensor) and self.norm.eps is not None
        gated, *after = memory_step(token, learned, state.recent_BTC, state.memory, self.norm.eps, self.implementation)
        return self.out(gated)[:, None], NeuralState(*after), None
