"""What the engine asks of a model. Whatever has these members can be generated with.

A cache is all that a model remembers of the text: keys and values, recurrent state, memory slots. It is made once for
a number of rows and a length, and its buffers never move: one step is recorded as a CUDA graph and replayed on them.

B: rows, S: tokens, V: vocabulary.
"""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


class Cache(Protocol):
    """Held for the length of a text; `reset` forgets the text and keeps the memory."""

    @property
    def bytes(self) -> int:
        """What its buffers take."""
        ...

    def reset(self) -> None:
        """Every row is empty again, in place: buffers keep their addresses, which a recorded step holds."""
        ...


class LanguageModel(Protocol):
    """An `nn.Module` with these members; all run without gradients."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int | None:
        """The most tokens that a row may come to, prompt and answer together; None where nothing limits it."""
        ...

    def new_cache(self, batch: int, length: int) -> Any:
        """A `Cache` of empty rows with room for `length` tokens each, on the model's device."""
        ...

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Any) -> Tensor:
        """Takes in the first `counts_B` tokens of each row, 0 to S, after those that the cache holds.

        The other tokens are padding, and must leave no trace. Gives logits (B, V) after each row's last token; those
        of a row with a count of 0 are not read. May wait for the device.
        """
        ...

    def prepare(self, cache: Any) -> None:
        """The host's part of a step, before each: it is not recorded, and may choose by what the host knows."""
        ...

    def step(self, tokens_B: Tensor, cache: Any) -> Tensor:
        """Takes in one token for every row, and gives logits (B, V) for the next.

        It is recorded and replayed, so it must not wait for the device, not choose by values, and change nothing but
        the cache's buffers, in place.
        """
        ...


@runtime_checkable
class Remembering(Protocol):
    """A `LanguageModel` that remembers texts of any length in a value of one size: its caches are `ValuedCache`s."""

    def new_state(self, batch: int = 1) -> Any:
        """Nothing remembered yet. Its `rows([i])` is that of one text of the batch."""
        ...


@runtime_checkable
class Repeating(Protocol):
    """A `LanguageModel` with `ValuedCache`s that takes pieces of a prompt in, all of one length, by the same work: it
    is recorded and replayed, as a step is."""

    def piece(self, most: int) -> int:
        """How many tokens a piece has, at most so many; 0 where so few are no piece."""
        ...

    def until_piece(self, cache: Any) -> int | None:
        """Tokens that every row must take in before a piece can follow; None where no number serves all rows."""
        ...

    def prepare_piece(self, tokens: int, cache: Any) -> None:
        """The host's part, before each: it is not recorded."""
        ...

    def take_in(self, tokens_BS: Tensor, cache: Any) -> Tensor:
        """A piece of every row; gives logits (B, V) after it. What goes for `step` goes for it too."""
        ...


class ValuedCache(Cache, Protocol):
    """Its size does not depend on a length, and what it holds can be taken out and put back."""

    def restore(self, state: Any) -> None:
        """Every row goes on from the state's, in place; refuses a state of another model or number of rows."""
        ...

    def snapshot(self) -> Any:
        """A copy of what it holds, which later steps leave as it is."""
        ...
