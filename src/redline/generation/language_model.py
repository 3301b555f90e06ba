"""The interface of a model that the engine can run.

A cache holds everything that a model keeps of a text: keys and values, recurrent state, memory slots. It is created for
a number of rows and a length, and its buffers never move, because a captured CUDA graph refers to their addresses.

B: rows, S: tokens, V: vocabulary.
"""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class Cache(Protocol):
    """The cache of a batch of texts; `reset` makes it empty without freeing its buffers."""

    @property
    def bytes(self) -> int:
        """The size of the cache's buffers in bytes."""
        ...

    def reset(self) -> None:
        """Empties every row in place: the buffers keep their addresses, because a captured graph refers to them."""
        ...


class LanguageModel(Protocol):
    """An `nn.Module` with these members. The engine calls them with gradients disabled."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int | None:
        """The largest number of tokens in a row, prompt and answer together; None if unlimited."""
        ...

    def new_cache(self, batch: int, length: int) -> Any:
        """Returns an empty `Cache` for rows of up to `length` tokens, on the model's device."""
        ...

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Any) -> Tensor:
        """Appends the first `counts_B` (0 to S) tokens of each row to the cache.

        The other tokens are padding and must have no effect. Returns logits (B, V) after each row's last token; for a
        row with a count of 0, they may have any value. May synchronize with the device.
        """
        ...

    def prepare(self, cache: Any) -> None:
        """Runs on the host before each step. It is not part of the CUDA graph, so it may branch on values."""
        ...

    def step(self, tokens_B: Tensor, cache: Any) -> Tensor:
        """Appends one token to every row and returns logits (B, V) for the next.

        The step is captured and replayed: it must not synchronize, must not branch on tensor values, and may change
        only the cache's buffers, in place.
        """
        ...


@runtime_checkable
class MemoryModel(Protocol):
    """A `LanguageModel` with neural memory: a state of fixed size for texts of any length. Its caches are
    `StateCache`s."""

    def new_state(self, batch: int = 1) -> Any:
        """Returns an empty state for `batch` texts; its `rows([i])` is the state of text i."""
        ...


@runtime_checkable
class PiecewiseModel(Protocol):
    """A `LanguageModel` with `StateCache`s, which can prefill in pieces of fixed length, each a CUDA graph launch."""

    def piece(self, most: int) -> int:
        """Returns the number of tokens per piece, at most `most`; 0 if `most` is too small for a piece."""
        ...

    def until_piece(self, cache: Any) -> int | None:
        """Returns how many tokens every row must append before a piece can start; None if the rows differ in this."""
        ...

    def prepare_piece(self, tokens: int, cache: Any) -> None:
        """Runs on the host before each piece. It is not part of the CUDA graph."""
        ...

    def take_in(self, tokens_BS: Tensor, cache: Any) -> Tensor:
        """Appends a piece to every row and returns logits (B, V) after it. The restrictions of `step` apply."""
        ...


class StateCache(Cache, Protocol):
    """A cache of fixed size, whose content can be saved and restored."""

    def restore(self, state: Any) -> None:
        """Copies a state into the cache, in place. Raises if the model or the number of rows differs."""
        ...

    def snapshot(self) -> Any:
        """Returns a copy of the cache's content, which later steps do not change."""
        ...
