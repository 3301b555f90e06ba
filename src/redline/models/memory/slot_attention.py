"""Attention over a window of recent tokens and a bank of slots, in one softmax.

Text is divided into segments. A token attends to itself, to earlier tokens of its segment, and to the `window_segments`
segments before it. A segment that leaves the window is offered to the slot bank; from then on, tokens attend only to
what the bank has kept of it. All tokens of a segment therefore see the same bank, and no token is seen twice. Positions
count from the document's start. Keys and values pass a short convolution, so that a slot holds a token with its local
context; queries and keys are normalized.

There are two modes. Without a state, whole sequences are processed at once, a row may hold several documents, and all
tokens that left the window are kept; training needs this, because a bank that evicts while it learns does not converge.
With a state, tokens are processed segment by segment with a bank of a fixed number of slots; if the layer
has no bank, all segments are processed at once.

Shapes: B sequences, T or S tokens, H key-value heads of D channels, each shared by G queries; L tokens in the ring.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.models.memory.config import TitanConfig
from redline.models.memory.neural_memory import new_taps, short_convolution
from redline.models.memory.slot_bank import SlotBank, gather_rows
from redline.models.memory.token_positions import LEAST_CHANNELS, Rotation, TokenPositions
from redline.models.memory.windowed_attention import attention_of_last_tokens, logits, mix, windowed_attention
from redline.nn.causal_attention import span_kernels_are_faster
from redline.nn.linear import Linear
from redline.nn.switchable import SwitchableModule

# The initial bias of the scores, with which nearly all tokens are kept.
_FIRST_SCORE = 2.0


@dataclass(frozen=True)
class WindowState:
    """A ring buffer of the last tokens: row p % L holds the token at position p, with its rotated key.

    `recent_BTC` holds the last inputs of the convolution, which the next tokens need.
    """

    recent_BTC: Tensor
    key_BLHD: Tensor
    value_BLHD: Tensor
    score_BL: Tensor
    bank: SlotBank | None


class SlotAttention(SwitchableModule):
    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.config = config
        heads, head_dim = config.shared_heads, config.head_dim
        self.query = Linear(config.width, config.width, bias=False)
        self.key_value = Linear(config.width, 2 * heads * head_dim, bias=False)
        self.convolution = new_taps(config.convolution, 2 * heads * head_dim)
        # Scores how much a key and value are worth keeping in the bank.
        self.score = Linear(2 * heads * head_dim, 1) if config.memory_slots else None
        if self.score is not None:
            nn.init.constant_(self.score.bias, _FIRST_SCORE)
        self.out = Linear(config.width, config.width, bias=False)

    def active_implementation(self) -> str:
        """Returns the implementation used for whole sequences; with a state it is always PyTorch's attention."""
        weight, head_dim = self.out.weight, self.config.head_dim
        if self.implementation != "reference" and span_kernels_are_faster(weight, head_dim):
            return "triton"
        return "flex attention" if weight.is_cuda and head_dim >= LEAST_CHANNELS else "reference"

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> WindowState:
        config = self.config
        heads, head_dim, number = config.shared_heads, config.head_dim, torch.promote_types(dtype, torch.float32)
        key, value = (torch.zeros(batch, config.span, heads, head_dim, device=device, dtype=dtype) for _ in range(2))
        score = torch.zeros(batch, config.span, device=device, dtype=number)
        recent = torch.zeros(batch, len(self.convolution) - 1, 2 * heads * head_dim, device=device, dtype=dtype)
        bank = None
        if config.memory_slots:
            bank = SlotBank.empty(batch, config.memory_slots, heads, head_dim, device, dtype)
        return WindowState(recent, key, value, score, bank)

    def forward(
        self, x_BSD: Tensor, positions: TokenPositions, state: WindowState | None = None
    ) -> tuple[Tensor, WindowState | None, Tensor | None]:
        """Returns the output, the new state (None without a given state), and the scores (None with a given state)."""
        if state is None:
            out, score = self._whole(x_BSD, positions)
            return out, None, score
        if state.bank is None and x_BSD.shape[1] > 1:
            return *self._advance_by_window(x_BSD, positions, state), None
        outputs = []
        cuts = sorted({0, *positions.segment_starts, x_BSD.shape[1]})
        for begin, end in pairwise(cuts):
            part = positions.part(begin, end)
            if begin in positions.segment_starts:
                state = self.settle(state, part.positions_BS[:, 0])
            out, state = self._advance(x_BSD[:, begin:end], part, state)
            outputs.append(out)
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], state, None

    def _whole(self, x_BSD: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor | None]:
        recent = self.key_value.weight.new_zeros(len(x_BSD), len(self.convolution) - 1, self.convolution.shape[1])
        query, key, value, score, _ = self._project(x_BSD, recent, positions.documents_BS)
        out = windowed_attention(
            *positions.rotation.rotate(query, key),
            value,
            positions,
            self.config.segment,
            self.config.window_segments,
            far=None if score is None else (query, key, F.logsigmoid(score)),
            implementation=self.implementation,
        )
        return self.out(out.flatten(2)), score

    def _advance(self, x_BTD: Tensor, positions: TokenPositions, state: WindowState) -> tuple[Tensor, WindowState]:
        span, segment, positions_BT = self.config.span, self.config.segment, positions.positions_BS
        query, key, value, score, recent = self._project(x_BTD, state.recent_BTC, None)
        rotated_query, rotated_key = positions.rotation.rotate(query, key)
        rows_BT = positions_BT % span
        state = replace(
            state,
            recent_BTC=recent,
            key_BLHD=_write_rows(state.key_BLHD, rows_BT, rotated_key),
            value_BLHD=_write_rows(state.value_BLHD, rows_BT, value),
            score_BL=state.score_BL if score is None else _write_rows(state.score_BL, rows_BT, score),
        )
        last_B1 = positions_BT[:, -1:]
        held_BL = last_B1 - (last_B1 - torch.arange(span, device=x_BTD.device)) % span
        age_BTL = positions_BT[:, :, None] // segment - held_BL[:, None] // segment
        seen_BTL = (held_BL >= 0)[:, None] & (held_BL[:, None] <= positions_BT[:, :, None])
        seen_BTL = seen_BTL & (age_BTL <= self.config.window_segments)
        near = logits(rotated_query, state.key_BLHD).masked_fill(~seen_BTL[:, None, None], -torch.inf)
        bank = state.bank
        if bank is None:
            return self.out(mix(near.softmax(-1), state.value_BLHD).flatten(2)), state
        far = logits(query, bank.key_BMHD) + bank.bias_BM[:, None, None, None]
        near, far = torch.cat((near, far), -1).softmax(-1).split((span, bank.slots), -1)
        out = mix(near, state.value_BLHD) + mix(far, bank.value_BMHD)
        return self.out(out.flatten(2)), replace(state, bank=bank.with_read(far.mean((1, 2))))

    def _advance_by_window(
        self, x_BSD: Tensor, positions: TokenPositions, state: WindowState
    ) -> tuple[Tensor, WindowState]:
        """Processes many tokens at once, without a bank: they attend to the ring buffer's tokens and the new tokens."""
        span, positions_BS = self.config.span, positions.positions_BS
        query, key, value, _, recent = self._project(x_BSD, state.recent_BTC, None)
        query, key = positions.rotation.rotate(query, key)
        held_BL = positions_BS[:, :1] + torch.arange(-span, 0, device=x_BSD.device)
        ordered = [gather_rows(ring, held_BL % span) for ring in (state.key_BLHD, state.value_BLHD)]
        keys, values = (torch.cat(pair, 1) for pair in zip(ordered, (key, value), strict=True))
        held_positions = torch.cat((held_BL, positions_BS), 1)
        out = attention_of_last_tokens(query, keys, values, held_positions, self.config.segment, span)
        last_BT = positions_BS[:, -span:] % span  # the ring keeps only the last token of those that share a row
        state = replace(
            state,
            recent_BTC=recent,
            key_BLHD=_write_rows(state.key_BLHD, last_BT, key[:, -span:]),
            value_BLHD=_write_rows(state.value_BLHD, last_BT, value[:, -span:]),
        )
        return self.out(out.flatten(2)), state

    def settle(self, state: WindowState, position_B: Tensor) -> WindowState:
        """Offers the window's oldest segment to the slot bank, in sequences whose next token begins a segment."""
        bank, config = state.bank, self.config
        if bank is None:
            return state
        due_B = (position_B % config.segment == 0) & (position_B >= config.span)
        offsets = torch.arange(config.segment, device=position_B.device)
        positions_BC = (position_B[:, None] - config.span + offsets).clamp_min(0)
        rows_BC = (position_B[:, None] + offsets) % config.span
        rotation = Rotation.at(positions_BC, config.head_dim, config.rope_base)
        written = bank.with_written(
            rotation.unrotate(gather_rows(state.key_BLHD, rows_BC)),
            gather_rows(state.value_BLHD, rows_BC),
            gather_rows(state.score_BL, rows_BC),
            config.memory_compression_ratio,
            config.use_adaptive_compression,
            config.merge_cosine,
            due_B,
        )
        return replace(state, bank=written)

    def _project(
        self, x_BSD: Tensor, recent_BTC: Tensor, documents_BS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        config = self.config
        query = self.query(x_BSD).unflatten(-1, (config.heads, config.head_dim))
        mixed, recent_BTC = short_convolution(self.key_value(x_BSD), self.convolution, recent_BTC, documents_BS)
        key, value = mixed.unflatten(-1, (2, config.shared_heads, config.head_dim)).unbind(-3)
        # Normalization bounds the logits. Otherwise the model learns to outweigh low scores by large logits, and the
        # bank, which selects by score, evicts tokens that are needed.
        query, key = (F.rms_norm(one, (config.head_dim,), eps=config.norm_eps) for one in (query, key))
        score = None
        if self.score is not None:
            score = self.score(mixed).squeeze(-1).to(torch.promote_types(x_BSD.dtype, torch.float32))
        return query, key, value, score, recent_BTC


def _write_rows(ring_BL: Tensor, rows_BT: Tensor, new_BT: Tensor) -> Tensor:
    """Returns a copy of the ring buffer with new tokens in the rows `rows_BT`."""
    sequences = torch.arange(len(rows_BT), device=rows_BT.device)[:, None]
    return ring_BL.index_put((sequences, rows_BT), new_BT.to(ring_BL.dtype))
