"""A decoder with long-term memory: layers of neural memory, and layers of attention with a window and a bank of slots.

Whole texts, pieces of texts and single tokens give the same outputs, in training mode and in evaluation mode alike;
what is remembered between calls is a value that the caller holds.

Shapes: B sequences of S tokens, width D, vocabulary V.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.memory.cache import MemoryCache
from redline.models.memory.config import TitanConfig
from redline.models.memory.neural_memory import NeuralMemory
from redline.models.memory.slot_attention import SlotAttention, WindowState
from redline.models.memory.state import LayerState, MemoryState, Origin
from redline.models.memory.token_positions import Passage
from redline.nn.checkpointing import GRANULARITIES, recomputed
from redline.nn.head import Head
from redline.nn.packing import Packing
from redline.nn.rms_norm import RMSNorm
from redline.nn.swiglu import SwiGLU

# Over the square root of the width: 0.02 at a width of 768, and as much as a narrow model needs to learn.
_SPREAD = 0.55
_LOWEST_SCORE = -20.0


def wanted(score_BS: Tensor) -> Tensor:
    """The mean of scores above the lowest that matters, 1 where they are 0.

    Linear, not σ(score): that hardly changes below −5, and what is needed and what is not would end up side by side
    there, since attention can make up for a low score by a high product.
    """
    return (1 - score_BS / _LOWEST_SCORE).clamp_min(0).mean()


class Block(nn.Module):
    """A mixer, then a feed-forward; each reads the norm of the stream and adds to it.

    What was computed last is handed on apart from the stream, so that the next norm adds it in the same pass.
    `recompute` is "layer" where the mixer and the feed-forward each throw their activations away.
    """

    def __init__(self, config: TitanConfig, layer: int) -> None:
        super().__init__()
        self.recompute = ""
        self.mixer_norm = RMSNorm(config.width, config.norm_eps)
        self.mixer = SlotAttention(config) if config.is_attention(layer) else NeuralMemory(config)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_eps)
        self.feed_forward = SwiGLU(config.width, config.feed_forward_width)

    def forward(
        self, branch_BSD: Tensor, residual_BSD: Tensor | None, passage: Passage, state: LayerState | None
    ) -> tuple[Tensor, Tensor, LayerState | None, Tensor | None]:
        if self.recompute == "layer":
            mixed, residual, state, score = recomputed(self._mix, branch_BSD, residual_BSD, passage, state)
            return *recomputed(self._feed, mixed, residual), state, score
        mixed, residual, state, score = self._mix(branch_BSD, residual_BSD, passage, state)
        return *self._feed(mixed, residual), state, score

    def _mix(
        self, branch_BSD: Tensor, residual_BSD: Tensor | None, passage: Passage, state: LayerState | None
    ) -> tuple[Tensor, Tensor, Any, Any]:
        normed, residual = self.mixer_norm.add(branch_BSD, residual_BSD)
        mixed, state, score = self.mixer(normed, passage, state)
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
        spread = _SPREAD * config.width**-0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.endswith("convolution"):
                # What adds to the stream starts smaller, so that the stream does not grow with the depth.
                branch = name.endswith(("mixer.out.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=spread / (2 * config.layers) ** 0.5 if branch else spread)
        self.tie()

    def tie(self) -> None:
        """One weight for embedding and head where the config says so; moving off the meta device parts them."""
        if self.config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor, documents: Tensor | Packing | None = None, keep_all: bool = False) -> Tensor:
        """Logits (B, S, V) for the token after each; `documents` numbers each token's document.

        `keep_all` reads every token that left the window, as if the bank had room for all: for training, and for many
        documents in a row. Otherwise the bank has its slots, as in `advance`.
        """
        return self.head(self._hidden(tokens_BS, documents, keep_all)[0])

    def advance(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Logits for the next tokens of texts that were begun, and what is remembered after them."""
        hidden, state = self._advance(tokens_BS, state)
        return self.head(hidden), state

    def advance_one(self, tokens_B: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """One token of each sequence, and no word from the host: the caller settles the state where segments begin."""
        hidden, state = self._go_on(tokens_B[:, None], state, ())
        return self.head(hidden[:, 0]), state

    def settle(self, state: MemoryState) -> MemoryState:
        """Moves what leaves the window into the bank, for sequences whose next token begins a segment."""

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
        """Nothing limits the length of a text."""
        return None

    def new_cache(self, batch: int, length: int) -> MemoryCache:
        """For any length: what is remembered does not grow."""
        return MemoryCache(self.new_state(batch), self.config.segment)

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: MemoryCache) -> Tensor:
        """Takes in the first `counts_B` tokens of each row, and gives the logits (B, V) after each row's last one."""
        self._check(tokens_BS)
        counts: list[int] = counts_B.tolist()
        # What all rows have is one batch, then what all have that go on, and so forth.
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
        cache.count(counts)
        return self.head.weight.new_zeros(len(counts), self.vocabulary) if logits is None else logits

    def prepare(self, cache: MemoryCache) -> None:
        """The host's part of a step, which is not recorded: what leaves the window goes into the bank."""
        if self.config.memory_slots and cache.begins_segment:
            cache.store(self.settle(cache.state))
        cache.count([1] * len(cache.positions))

    def step(self, tokens_B: Tensor, cache: MemoryCache) -> Tensor:
        """One token for every row, after `prepare`; changes the cache's buffers in place."""
        logits, state = self.advance_one(tokens_B, cache.state)
        cache.store(state)
        return logits

    def piece(self, most: int) -> int:
        """Whole segments, as many as fit."""
        return most // self.config.segment * self.config.segment

    def until_piece(self, cache: MemoryCache) -> int | None:
        """Every row must stand where a segment begins."""
        missing = {-position % self.config.segment for position in cache.positions}
        return missing.pop() if len(missing) == 1 else None

    def prepare_piece(self, tokens: int, cache: MemoryCache) -> None:
        """The host's part of `take_in`, which is not recorded."""
        cache.count([tokens] * len(cache.positions))

    def take_in(self, tokens_BS: Tensor, cache: MemoryCache) -> Tensor:
        """Whole segments of every row, after `prepare_piece`; changes the cache's buffers in place."""
        borders = tuple(range(0, tokens_BS.shape[1], self.config.segment))
        hidden, state = self._go_on(tokens_BS, cache.state, borders)
        cache.store(state)
        return self.head(hidden[:, -1])

    def _last(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        hidden, state = self._advance(tokens_BS, state)
        return self.head(hidden[:, -1]), state

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        documents: Tensor | Packing | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Cross-entropy over targets that are not −100, in training plus `score_weight` times the share wanted kept."""
        hidden, scores = self._hidden(tokens_BS, documents, keep_all=True)
        loss = self.head.loss(hidden, targets_BS, z_loss=z_loss)
        if self.training and self.score_weight and scores:
            loss = loss + self.score_weight * torch.stack([wanted(score) for score in scores]).mean()
        return loss

    def new_state(self, batch: int = 1) -> MemoryState:
        """Nothing remembered yet."""
        weight = self.embedding.weight
        layers = tuple(block.mixer.new_state(batch, weight.device, weight.dtype) for block in self._each_block())
        position_B = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return MemoryState(position_B, layers, Origin.of(self.config, self.named_parameters()))

    def get_memory_stats(self, state: MemoryState) -> dict[str, float]:
        """How full the banks of all layers are, what went through them, and the bytes of everything remembered."""
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
        """The same memory in fewer slots, half as many unless said: the most similar ones are merged."""

        def reduced(layer: LayerState) -> LayerState:
            if not isinstance(layer, WindowState) or layer.bank is None:
                return layer
            fewer = max(1, layer.bank.slots // 2) if slots is None else slots
            if not 1 <= fewer <= layer.bank.slots:
                raise ModelError(f"a bank of {layer.bank.slots} slots cannot be reduced to {fewer}.")
            return replace(layer, bank=layer.bank.reduced_to(fewer))

        if not any(isinstance(layer, WindowState) and layer.bank is not None for layer in state.layers):
            raise ModelError("the memory has no bank of slots that could be reduced.")
        return replace(state, layers=tuple(reduced(layer) for layer in state.layers))

    def gradient_checkpointing_enable(self, granularity: str = "block") -> None:
        """Activations are computed again in the backward pass: of whole blocks, of layers, or the cheap ones alone."""
        if granularity not in GRANULARITIES:
            known = ", ".join(GRANULARITIES)
            raise ModelError(f"activations can be recomputed by {known}, not by {granularity!r}.")
        self.recompute = granularity
        for block in self._each_block():
            block.recompute = granularity

    def gradient_checkpointing_disable(self) -> None:
        self.recompute = ""
        for block in self._each_block():
            block.recompute = ""

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
                raise ModelError("a bank of slots reads one document at a time: keep_all=True reads many in a row.")
            return self._advance(tokens_BS, self.new_state(len(tokens_BS)))[0], []
        passage = Passage.whole(tokens_BS, documents, self.config)
        hidden, _, scores = self._run(tokens_BS, passage, None)
        return hidden, scores

    def _advance(self, tokens_BS: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        self._check(tokens_BS)
        batch, count = tokens_BS.shape
        if batch != len(state.position_B):
            raise ModelError(f"a memory of {len(state.position_B)} sequences cannot go on with {batch}.")
        self._check_state(state)
        starts = state.position_B.tolist()
        segment = self.config.segment
        phases = {start % segment for start in starts}
        if count > 1 and len(phases) > 1:
            # Sequences whose segments begin at the same tokens are a batch each.
            groups = [[row for row, start in enumerate(starts) if start % segment == phase] for phase in phases]
            parts = [self._advance(tokens_BS[rows], state.rows(rows)) for rows in groups]
            places = sorted(range(batch), key=[row for rows in groups for row in rows].__getitem__)
            hidden = torch.cat([hidden for hidden, _ in parts])[places]
            return hidden, MemoryState.stack([after for _, after in parts]).rows(places)
        borders = tuple(i for i in range(count) if any((start + i) % segment == 0 for start in starts))
        return self._go_on(tokens_BS, state, borders)

    def _go_on(self, tokens_BS: Tensor, state: MemoryState, borders: tuple[int, ...]) -> tuple[Tensor, MemoryState]:
        """Without a word from the host, which says at which tokens segments begin."""
        count = tokens_BS.shape[1]
        passage = Passage.after(state.position_B, count, self.config, borders)
        hidden, layers, _ = self._run(tokens_BS, passage, state.layers)
        return hidden, MemoryState(state.position_B + count, layers, state.origin)

    def _check_state(self, state: MemoryState) -> None:
        """Only the settings, not the weights: a training may carry a memory over its steps."""
        if difference := state.origin.difference(self.config):
            raise ModelError(f"the memory is of another model: {difference}.")
        held, weight = state.layers[0].recent_BTC, self.embedding.weight
        for ours, its in ((weight.dtype, held.dtype), (weight.device, held.device)):
            if ours != its:
                ours, its = (str(one).removeprefix("torch.") for one in (ours, its))
                raise ModelError(
                    f"a memory in {its} cannot go on in a model in {ours}: save it, and load it by new_state().load()."
                )

    def _check(self, tokens_BS: Tensor) -> None:
        if tokens_BS.ndim != 2 or tokens_BS.dtype not in (torch.int64, torch.int32):
            raise ModelError(
                f"a memory model takes whole numbers of shape (batch, tokens), not {tokens_BS.dtype} of shape "
                f"{tuple(tokens_BS.shape)}."
            )
        if not tokens_BS.shape[1]:
            raise ModelError("0 tokens, but the model takes 1 or more.")

    def _run(
        self, tokens_BS: Tensor, passage: Passage, states: tuple[LayerState, ...] | None
    ) -> tuple[Tensor, tuple[LayerState, ...], list[Tensor]]:
        if torch.is_autocast_enabled(tokens_BS.device.type):
            raise ModelError("a memory is kept in the precision of its model: take bf16 or fp16 instead of autocast.")
        branch, residual, after, scores = self.embedding(tokens_BS), None, [], []
        for index, block in enumerate(self.blocks):
            given = (branch, residual, passage, None if states is None else states[index])
            if self.recompute in ("block", "selective"):
                found = recomputed(block, *given, selective=self.recompute == "selective")
            else:
                found = block(*given)
            branch, residual, state, score = found
            after.append(state)
            if score is not None:
                scores.append(score)
        return self.norm.add(branch, residual)[0], tuple(after), scores
