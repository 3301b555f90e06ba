"""Titans: a decoder with layers of neural memory and layers of attention with a window and a bank of slots.

Processing a text as a whole, in chunks or token by token gives the same outputs, in training and in evaluation mode.
The state between calls is a `MemoryState` that the caller holds.

Shapes: B sequences of S tokens, width D, vocabulary V.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.memory.config import TitanConfig
from redline.models.memory.neural_memory import NeuralMemory
from redline.models.memory.slot_attention import SlotAttention, WindowState
from redline.models.memory.state import LayerState, MemoryCache, MemoryState, Origin
from redline.models.memory.token_positions import TokenPositions
from redline.nn.checkpointing import GRANULARITIES, checkpointed
from redline.nn.head import Head
from redline.nn.packing import Packing
from redline.nn.rms_norm import RMSNorm
from redline.nn.swiglu import SwiGLU

# The standard deviation of the initial weights is this number divided by the square root of the width: 0.02 at a width
# of 768, and more in narrow models, which need larger weights to learn.
_INITIAL_STD = 0.55
_LOWEST_SCORE = -20.0


def kept_share(score_BS: Tensor) -> Tensor:
    """Returns the mean over linearly rescaled scores: 0 becomes 1, `_LOWEST_SCORE` and lower scores become 0.

    The scale is linear because the gradient of σ(score) vanishes below −5. With σ instead, the scores of needed and
    unneeded tokens alike would end up below −5, because a large product of query and key can compensate a low score.
    """
    return (1 - score_BS / _LOWEST_SCORE).clamp_min(0).mean()


class Block(nn.Module):
    """A mixer (attention or neural memory) and a feed-forward layer, each with pre-norm and a residual connection.

    The output of the feed-forward layer is not yet added to the residual: the next block's norm does so in its kernel.
    With `recompute == "layer"` the mixer and the feed-forward layer are checkpointed separately.
    """

    def __init__(self, config: TitanConfig, layer: int) -> None:
        super().__init__()
        self.recompute = ""
        self.mixer_norm = RMSNorm(config.width, config.norm_eps)
        self.mixer = SlotAttention(config) if config.is_attention(layer) else NeuralMemory(config)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_eps)
        self.feed_forward = SwiGLU(config.width, config.feed_forward_width)

    def forward(
        self, branch_BSD: Tensor, residual_BSD: Tensor | None, positions: TokenPositions, state: LayerState | None
    ) -> tuple[Tensor, Tensor, LayerState | None, Tensor | None]:
        if self.recompute == "layer":
            mixed, residual, state, score = checkpointed(self._mix, branch_BSD, residual_BSD, positions, state)
            return *checkpointed(self._feed, mixed, residual), state, score
        mixed, residual, state, score = self._mix(branch_BSD, residual_BSD, positions, state)
        return *self._feed(mixed, residual), state, score

    def _mix(
        self, branch_BSD: Tensor, residual_BSD: Tensor | None, positions: TokenPositions, state: LayerState | None
    ) -> tuple[Tensor, Tensor, Any, Any]:
        normed, residual = self.mixer_norm.add(branch_BSD, residual_BSD)
        mixed, state, score = self.mixer(normed, positions, state)
        return mixed, residual, state, score

    def _feed(self, branch_BSD: Tensor, residual_BSD: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.feed_forward_norm.add(branch_BSD, residual_BSD)
        return self.feed_forward(normed), residual


class TitanModel(nn.Module):
    def __init__(self, config: TitanConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute, self.score_weight = "", 0.0
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Head(config.width, config.vocabulary)
        std = _INITIAL_STD * config.width**-0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.endswith("convolution"):
                # The last layer of each residual branch starts small, so that the stream does not grow with the depth.
                branch = name.endswith(("mixer.out.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=std / (2 * config.layers) ** 0.5 if branch else std)
        self.tie()

    def tie(self) -> None:
        """Ties embedding and head if the config says so; call it again after moving off the meta device."""
        if self.config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor, documents: Tensor | Packing | None = None, keep_all: bool = False) -> Tensor:
        """Returns logits (B, S, V) for the next token; `documents` numbers each token's document.

        With `keep_all`, tokens also attend to every token that left the window, as if the bank had unlimited slots;
        training and packed documents need this. Otherwise the bank has its fixed number of slots, as in `advance`.
        """
        return self.head(self._hidden(tokens_BS, documents, keep_all)[0])

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Returns the normalized states (B, S, D) that the head reads."""
        return self._hidden(tokens_BS, None, keep_all=False)[0]

    def advance(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Continues texts from a state; returns logits and the new state."""
        hidden, state = self._advance(tokens_BS, state)
        return self.head(hidden), state

    def advance_one(self, tokens_B: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Processes one token per sequence without host synchronization.

        The caller must call `settle` before a token that begins a segment.
        """
        hidden, state = self._continue(tokens_B[:, None], state, ())
        return self.head(hidden[:, 0]), state

    def settle(self, state: MemoryState) -> MemoryState:
        """Offers the window's oldest segment to the slot bank, in rows whose next token begins a segment."""

        def settled(mixer: nn.Module, layer: LayerState) -> LayerState:
            if isinstance(mixer, SlotAttention) and isinstance(layer, WindowState):
                return mixer.settle(layer, state.position_B)
            return layer

        pairs = zip(self._each_block(), state.layers, strict=True)
        return replace(state, layers=tuple(settled(block.mixer, layer) for block, layer in pairs))

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> None:
        """None, because the length of a text is unlimited."""
        return None

    def new_cache(self, batch: int, length: int) -> MemoryCache:
        """Returns a cache, which serves any length because the state does not grow."""
        return MemoryCache(self.new_state(batch), self.config.segment)

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: MemoryCache) -> Tensor:
        """Processes the first `counts_B` tokens of each row; returns the logits (B, V) after each row's last token."""
        self._check(tokens_BS)
        counts: list[int] = counts_B.tolist()
        # Processes all rows in one batch up to the end of the shortest, then the others up to the next end, and so on.
        done, ends = 0, sorted(set(counts) - {0})
        logits: Tensor | None = None
        for end in ends:
            rows = [row for row, count in enumerate(counts) if count >= end]
            if len(rows) == len(counts):
                logits, state = self._last(tokens_BS[:, done:end], cache.state)
                cache.store(state)
            else:
                last, state = self._last(tokens_BS[rows, done:end], cache.state.rows(rows))
                cache.store(state, rows)
                logits = last.new_zeros(len(counts), last.shape[1]) if logits is None else logits
                logits[rows] = last
            done = end
        cache.advance_positions(counts)
        return self.head.weight.new_zeros(len(counts), self.vocabulary) if logits is None else logits

    def prepare(self, cache: MemoryCache) -> None:
        """Does the part of a step that is not captured in the CUDA graph: updates the slot bank and the positions."""
        if self.config.memory_slots and cache.begins_segment:
            cache.store(self.settle(cache.state))
        cache.advance_positions([1] * len(cache.positions))

    def step(self, tokens_B: Tensor, cache: MemoryCache) -> Tensor:
        """Processes one token per row, after `prepare`; updates the cache's buffers in place."""
        logits, state = self.advance_one(tokens_B, cache.state)
        cache.store(state)
        return logits

    def piece(self, most: int) -> int:
        """Returns the number of prompt tokens per call of `take_in`: `most`, rounded down to whole segments."""
        return most // self.config.segment * self.config.segment

    def until_piece(self, cache: MemoryCache) -> int | None:
        """Returns the number of tokens until all rows begin a segment, or None if they never do so together."""
        missing = {-position % self.config.segment for position in cache.positions}
        return missing.pop() if len(missing) == 1 else None

    def prepare_piece(self, tokens: int, cache: MemoryCache) -> None:
        """Does the part of `take_in` that is not captured in the CUDA graph: updates the positions."""
        cache.advance_positions([tokens] * len(cache.positions))

    def take_in(self, tokens_BS: Tensor, cache: MemoryCache) -> Tensor:
        """Processes whole segments of every row, after `prepare_piece`; updates the cache's buffers in place."""
        segment_starts = tuple(range(0, tokens_BS.shape[1], self.config.segment))
        hidden, state = self._continue(tokens_BS, cache.state, segment_starts)
        cache.store(state)
        return self.head(hidden[:, -1])

    def _last(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        hidden, state = self._advance(tokens_BS, state)
        return self.head(hidden[:, -1]), state

    def loss(
        self, tokens_BS: Tensor, targets_BS: Tensor, documents: Tensor | Packing | None = None, z_loss: float = 0.0
    ) -> Tensor:
        """Returns the cross-entropy over targets other than −100; in training adds `score_weight · kept_share`."""
        hidden, scores = self._hidden(tokens_BS, documents, keep_all=True)
        loss = self.head.loss(hidden, targets_BS, z_loss=z_loss)
        if self.training and self.score_weight and scores:
            loss = loss + self.score_weight * torch.stack([kept_share(score) for score in scores]).mean()
        return loss

    def new_state(self, batch: int = 1) -> MemoryState:
        """Returns an empty state."""
        weight = self.embedding.weight
        layers = tuple(block.mixer.new_state(batch, weight.device, weight.dtype) for block in self._each_block())
        position_B = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return MemoryState(position_B, layers, Origin.of(self.config, self.named_parameters()))

    def get_memory_stats(self, state: MemoryState) -> dict[str, float]:
        """Returns the fill level and the counters of all slot banks, and the bytes of the state."""
        banks = [layer.bank for layer in state.layers if isinstance(layer, WindowState) and layer.bank is not None]
        stats: dict[str, float] = {"bytes": state.bytes, "slots": sum(bank.mass_BM.numel() for bank in banks)}
        for name in ("writes_B", "merges_B", "evictions_B"):
            stats[name[:-2]] = sum(getattr(bank, name).sum().item() for bank in banks)
        stats["used"] = sum(bank.filled_BM.sum().item() for bank in banks)
        stats["mass"] = sum(bank.mass_BM.sum().item() for bank in banks)
        stats["usage"] = sum(bank.usage_BM.sum().item() for bank in banks) / max(1, stats["used"])
        stats["utilization"] = stats["used"] / max(1, stats["slots"])
        return stats

    def reduce_memory_slots(self, state: MemoryState, slots: int | None = None) -> MemoryState:
        """Returns the state with `slots` slots per bank (default: half); merges the most similar slots."""

        def reduced(layer: LayerState) -> LayerState:
            if not isinstance(layer, WindowState) or layer.bank is None:
                return layer
            fewer = max(1, layer.bank.slots // 2) if slots is None else slots
            if not 1 <= fewer <= layer.bank.slots:
                raise ModelError(f"a bank of {layer.bank.slots} slots cannot be reduced to {fewer}.")
            return replace(layer, bank=layer.bank.reduced_to(fewer))

        if not any(isinstance(layer, WindowState) and layer.bank is not None for layer in state.layers):
            raise ModelError("the state has no slot bank that could be reduced.")
        return replace(state, layers=tuple(reduced(layer) for layer in state.layers))

    def gradient_checkpointing_enable(self, granularity: str = "block") -> None:
        """Recomputes activations in the backward pass: per block, per layer, or only the cheap ones ("selective")."""
        if granularity not in GRANULARITIES:
            raise ModelError(f"unknown granularity {granularity!r}: use one of {', '.join(GRANULARITIES)}.")
        for module in (self, *self._each_block()):
            module.recompute = granularity

    def gradient_checkpointing_disable(self) -> None:
        for module in (self, *self._each_block()):
            module.recompute = ""

    def _each_block(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def _hidden(
        self, tokens_BS: Tensor, documents: Tensor | Packing | None, keep_all: bool
    ) -> tuple[Tensor, list[Tensor]]:
        self._check(tokens_BS)
        if self.config.memory_slots and not keep_all:
            if documents is not None:
                raise ModelError("a slot bank holds one document at a time: use keep_all=True for packed documents.")
            return self._advance(tokens_BS, self.new_state(len(tokens_BS)))[0], []
        positions = TokenPositions.whole(tokens_BS, documents, self.config)
        hidden, _, scores = self._run(tokens_BS, positions, None)
        return hidden, scores

    def _advance(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        self._check(tokens_BS)
        batch, count = tokens_BS.shape
        if batch != len(state.position_B):
            raise ModelError(f"the state holds {len(state.position_B)} sequences, but {batch} were given.")
        self._check_state(state)
        starts = state.position_B.tolist()
        segment = self.config.segment
        phases = {start % segment for start in starts}
        if count > 1 and len(phases) > 1:
            # Processes the sequences in batches, each of sequences whose segments begin at the same offsets.
            groups = [[row for row, start in enumerate(starts) if start % segment == phase] for phase in phases]
            parts = [self._advance(tokens_BS[rows], state.rows(rows)) for rows in groups]
            order = sorted(range(batch), key=[row for rows in groups for row in rows].__getitem__)
            hidden = torch.cat([hidden for hidden, _ in parts])[order]
            return hidden, MemoryState.stack([after for _, after in parts]).rows(order)
        segment_starts = tuple(i for i in range(count) if any((start + i) % segment == 0 for start in starts))
        return self._continue(tokens_BS, state, segment_starts)

    def _continue(
        self, tokens_BS: Tensor, state: MemoryState, segment_starts: tuple[int, ...]
    ) -> tuple[Tensor, MemoryState]:
        """Processes tokens without host synchronization; segments begin at the offsets `segment_starts`."""
        count = tokens_BS.shape[1]
        positions = TokenPositions.after(state.position_B, count, self.config, segment_starts)
        hidden, layers, _ = self._run(tokens_BS, positions, state.layers)
        return hidden, MemoryState(state.position_B + count, layers, state.origin)

    def _check_state(self, state: MemoryState) -> None:
        """Compares settings but not weights, because training may keep a state while the weights change."""
        if difference := state.origin.difference(self.config):
            raise ModelError(f"the state belongs to another model: {difference}.")
        held, weight = state.layers[0].recent_BTC, self.embedding.weight
        for ours, its in ((weight.dtype, held.dtype), (weight.device, held.device)):
            if ours != its:
                ours, its = (str(one).removeprefix("torch.") for one in (ours, its))
                raise ModelError(
                    f"the state is in {its}, but the model in {ours}: save the state and load it with "
                    "new_state().load()."
                )

    def _check(self, tokens_BS: Tensor) -> None:
        if tokens_BS.ndim != 2 or tokens_BS.dtype not in (torch.int64, torch.int32):
            raise ModelError(
                f"a Titans model takes integers of shape (batch, tokens), not {tokens_BS.dtype} of shape "
                f"{tuple(tokens_BS.shape)}."
            )
        if not tokens_BS.shape[1]:
            raise ModelError("no tokens were given: the model takes 1 or more.")

    def _run(
        self, tokens_BS: Tensor, positions: TokenPositions, states: tuple[LayerState, ...] | None
    ) -> tuple[Tensor, tuple[LayerState, ...], list[Tensor]]:
        if torch.is_autocast_enabled(tokens_BS.device.type):
            raise ModelError("neural memory does not support autocast: use bf16 or fp16 instead of autocast.")
        branch, residual, after, scores = self.embedding(tokens_BS), None, [], []
        for index, block in enumerate(self.blocks):
            given = (branch, residual, positions, None if states is None else states[index])
            if self.recompute in ("block", "selective"):
                found = checkpointed(block, *given, selective=self.recompute == "selective")
            else:
                found = block(*given)
            branch, residual, state, score = found
            after.append(state)
            if score is not None:
                scores.append(score)
        return self.norm.add(branch, residual)[0], tuple(after), scores
