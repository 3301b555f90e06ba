"""A layer whose memory is a matrix per head, rewritten by every token: the gated delta rule, or the Titans update.

Queries, keys and values pass a short causal convolution; queries and keys are made unit vectors; what is read is
normalised and passes a sigmoid gate. Its state does not grow with the text: the matrices, and the last tokens before
the convolution.

Shapes: B sequences of S tokens, width D; H heads with keys of K and values of V channels; C = H · (2K + V).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.models.memory.config import TitanConfig
from redline.models.memory.passage import Passage
from redline.models.memory.updates import UPDATES, UpdateState
from redline.nn.choosing import Choosing


@dataclass(frozen=True)
class NeuralState:
    """`recent` are the inputs of the convolution that the next tokens still need."""

    recent_BTC: Tensor
    memory: UpdateState


class NeuralMemory(Choosing):
    implementation = "auto"

    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim = config.neural_heads, config.key_dim, config.value_dim
        channels = self.heads * (2 * self.key_dim + self.value_dim)
        self.query_key_value = nn.Linear(config.width, channels, bias=False)
        self.convolution = nn.Parameter(torch.empty(config.convolution, channels))
        nn.init.uniform_(self.convolution, -(config.convolution**-0.5), config.convolution**-0.5)
        self.update = UPDATES[config.memory_update](config.width, self.heads, config.memory_chunk)
        self.gate = nn.Linear(config.width, self.heads * self.value_dim, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=config.norm_eps)
        self.out = nn.Linear(self.heads * self.value_dim, config.width, bias=False)

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
        mixed, recent = short_convolution(self.query_key_value(x_BSD), self.convolution, state.recent_BTC, documents_BS)
        sizes = [self.heads * size for size in (self.key_dim, self.key_dim, self.value_dim)]
        query, key, value = (one.unflatten(-1, (self.heads, -1)) for one in F.silu(mixed).split(sizes, -1))
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        read, memory = self.update(x_BSD, query, key, value, state.memory, documents_BS, self.implementation)
        gated = self.norm(read) * self.gate(x_BSD).unflatten(-1, (self.heads, -1)).sigmoid()
        return self.out(gated.flatten(-2)), NeuralState(recent, memory), None


def short_convolution(
    x_BSC: Tensor, taps_TC: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each channel's weighted sum over the last tokens, its own the last; gives what the next tokens need as well."""
    length, count = x_BSC.shape[1], len(taps_TC)
    padded = torch.cat((recent_BTC.to(x_BSC.dtype), x_BSC), 1)
    total = x_BSC * taps_TC[-1]
    if documents_BS is not None:
        first = documents_BS[:, :1].expand(-1, count - 1)
        documents_BS = torch.cat((first, documents_BS), 1)
    for back in range(1, count):
        begin = count - 1 - back
        term = padded[:, begin : begin + length] * taps_TC[-1 - back]
        if documents_BS is not None:
            same = documents_BS[:, begin : begin + length] == documents_BS[:, count - 1 :]
            term = term * same.unsqueeze(-1)
        total = total + term
    recent = padded[:, length:]
    if documents_BS is not None:
        recent = recent * (documents_BS[:, length:] == documents_BS[:, -1:]).unsqueeze(-1)
    return total, recent
