"""Predicts tokens at chosen positions of a long text, in pieces, so that the logits never fill the memory.

A memory model carries its state from piece to piece. A decoder uses its key-value cache if only positions at the end
are queried; otherwise its hidden states are computed at once and its head is applied in pieces.

Shapes: B texts of S tokens, vocabulary V.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from redline.errors import ModelError

PIECE = 2048
# A piece has at most this many logits.
_LOGITS = 2**26
# If all queried positions are at most this far from the end, they are predicted token by token.
_ENDING = 64


class Cached(Protocol):
    """The members that every model has; see `redline.generation.language_model`."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int | None: ...

    def new_cache(self, batch: int, length: int) -> Any: ...

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Any) -> Tensor: ...


@runtime_checkable
class Advancing(Protocol):
    """A model with an explicit state."""

    def new_state(self, batch: int = 1) -> Any: ...

    def advance(self, tokens_BS: Tensor, state: Any) -> tuple[Tensor, Any]: ...


class Headed(Protocol):
    """A model that can return its hidden states without their logits."""

    head: Any

    def hidden(self, tokens_BS: Tensor) -> Tensor: ...


class Piece(NamedTuple):
    """The position where a piece starts, its logits (B, piece, V), and the model's state or cache after it, if any."""

    begin: int
    logits: Tensor
    held: Any


class Answers(NamedTuple):
    """The most likely next token at every queried position, in the order of the mask; −1 where logits are not finite.

    `state_bytes` is the size of the state or cache of one text after its last token.
    """

    tokens: Tensor
    state_bytes: int


@torch.no_grad()
def predict(model: Cached, tokens_BS: Tensor, asked_BS: Tensor) -> Answers:
    batch, length = tokens_BS.shape
    first = int(asked_BS.any(0).nonzero()[0])
    found_BS, held = torch.full_like(tokens_BS, -1), None
    for piece in _endings(model, tokens_BS, first) if length - first <= _ENDING else pieces(model, tokens_BS):
        likeliest = piece.logits.argmax(-1).masked_fill(~piece.logits.isfinite().all(-1), -1)
        found_BS[:, piece.begin : piece.begin + piece.logits.shape[1]] = likeliest
        held = piece.held
    # A model that processed the whole text at once has no state; the cache that it would need is counted instead.
    held_bytes = model.new_cache(1, length).bytes if held is None else held.bytes // batch
    return Answers(found_BS[asked_BS], held_bytes)


def pieces(model: Cached, tokens_BS: Tensor) -> Iterator[Piece]:
    batch, length = tokens_BS.shape
    size = piece_size(batch, model.vocabulary)
    if isinstance(model, Advancing):
        state = model.new_state(batch)
        for begin in range(0, length, size):
            logits, state = model.advance(tokens_BS[:, begin : begin + size], state)
            yield Piece(begin, logits, state)
    elif _is_headed(model):
        hidden = model.hidden(tokens_BS)
        for begin in range(0, length, size):
            yield Piece(begin, model.head(hidden[:, begin : begin + size]), None)
    else:
        raise ModelError(
            f"a {type(model).__name__} cannot return logits in pieces: it needs advance(), or head and hidden()."
        )


def _is_headed(model: object) -> TypeGuard[Headed]:
    # From Python 3.12 on, isinstance with a protocol does not find submodules of an nn.Module.
    return hasattr(model, "head") and hasattr(model, "hidden")


def piece_size(batch: int, vocabulary: int) -> int:
    """Returns the tokens per piece: a power of two, so that pieces end at the borders of segments and chunks."""
    most = max(16, min(PIECE, _LOGITS // (batch * vocabulary)))
    return 1 << (most.bit_length() - 1)


def _endings(model: Cached, tokens_BS: Tensor, first: int) -> Iterator[Piece]:
    """Yields logits (B, 1, V) of the tokens from `first` on; the tokens before `first` are prefilled in chunks."""
    batch, length = tokens_BS.shape
    cache = model.new_cache(batch, length)

    def take(begin: int, end: int) -> Tensor:
        part = tokens_BS[:, begin:end]
        return model.prefill(part, torch.full((batch,), end - begin, device=part.device), cache)

    for begin in range(0, first, PIECE):
        take(begin, min(begin + PIECE, first))
    for place in range(first, length):
        yield Piece(place, take(place, place + 1)[:, None], cache)
