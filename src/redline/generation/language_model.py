"""The interfaces of models that the engine can run.

A paged model keeps keys and values in pages, which grow with the text. A state model keeps a state of fixed size for
each text, for example a recurrent state or memory slots.

B: rows, S: tokens, T: tokens of all rows, M: tokens after which logits are wanted, V: vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from redline.models.decoder.paged_cache import FlatCall, PagePool


class LanguageModel(Protocol):
    """An `nn.Module` with these members. The engine calls it with gradients disabled."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int | None:
        """The largest number of tokens in a row, with prompt and generated tokens together; None if unlimited."""
        ...


@runtime_checkable
class PagedModel(Protocol):
    """A `LanguageModel` that stores keys and values in pages."""

    def new_pages(self, count: int, size: int) -> PagePool:
        """Returns `count` pages for `size` tokens each, on the model's device. Their addresses never change."""
        ...

    def flat(self, tokens_T: Tensor, call: FlatCall) -> Tensor:
        """Processes the new tokens of many rows and returns logits (M, V).

        Calls of one token per row are captured and replayed: they must not synchronize, must not branch on tensor
        values, and may change only the pages, in place.
        """
        ...


class Cache(Protocol):
    """The states of a batch of texts. Its buffers never move, because a captured graph refers to their addresses."""

    @property
    def bytes(self) -> int:
        """The size of the cache's buffers in bytes."""
        ...

    def gather(self, rows: Sequence[int]) -> "Cache":
        """Returns a new cache with a copy of these rows. A row may be given more than once."""
        ...

    def scatter(self, rows: Sequence[int], part: "Cache") -> None:
        """Copies the first rows of `part` into these rows, in place."""
        ...


class StateModel(Protocol):
    """A `LanguageModel` with a state of fixed size for each row."""

    def new_cache(self, batch: int, length: int) -> Any:
        """Returns an empty `Cache`, on the model's device. The size of a state does not depend on `length`."""
        ...

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Any) -> Tensor:
        """Appends the first `counts_B` (0 to S) tokens of each row to the cache.

        The other tokens are padding and must have no effect. Returns logits (B, V) after each row's last token; for a
        row with a count of 0, they may have any value. May synchronize with the device.
        """
        ...

    def prepare(self, cache: Any) -> None:
        """Prepares `step`. Runs on the host before each step, outside the CUDA graph, so it may branch on values."""
        ...

    def step(self, tokens_B: Tensor, cache: Any) -> Tensor:
        """Appends one token to every row and returns logits (B, V) for the next token.

        The restrictions of `PagedModel.flat` apply.
        """
        ...


@runtime_checkable
class MemoryModel(Protocol):
    """A `StateModel` with neural memory, whose state has a fixed size for texts of any length and can be stored.

    Its caches are `StateCache`s.
    """

    def new_state(self, batch: int = 1) -> Any:
        """Returns an empty state for `batch` texts; its `rows([i])` is the state of text i."""
        ...


@runtime_checkable
class PiecewiseModel(Protocol):
    """A `StateModel` with `StateCache`s that can prefill in pieces of fixed length, each by replaying a CUDA graph."""

    def piece(self, most: int) -> int:
        """Returns the number of tokens per piece, at most `most`; 0 if `most` is too small for a piece."""
        ...

    def until_piece(self, cache: Any) -> int | None:
        """Returns how many tokens must be appended before a piece can start; None if this differs between rows."""
        ...

    def prepare_piece(self, tokens: int, cache: Any) -> None:
        """Prepares `take_in` for a piece of `tokens` tokens. Runs on the host, outside the CUDA graph."""
        ...

    def take_in(self, tokens_BS: Tensor, cache: Any) -> Tensor:
        """Appends a piece to every row and returns logits (B, V) after it. The restrictions of `step` apply."""
        ...


class StateCache(Cache, Protocol):
    """A cache whose content can be saved and restored."""

    def restore(self, state: Any) -> None:
        """Copies a state into the cache, in place. Raises if the model or the number of rows differs."""
        ...

    def snapshot(self) -> Any:
        """Returns a copy of the cache's content, which later steps do not change."""
        ...
