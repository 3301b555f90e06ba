"""A memory model's state in buffers that stay where they are, for steps that are recorded once and replayed."""

from collections.abc import Sequence

from redline.errors import ModelError
from redline.models.memory.state import MemoryState


class MemoryCache:
    """`positions` mirrors on the host where each row stands, so that nobody waits for the device to learn it."""

    def __init__(self, state: MemoryState, segment: int) -> None:
        self.state, self.segment = state, segment
        self.positions = [0] * len(state.position_B)

    @property
    def bytes(self) -> int:
        return self.state.bytes

    def reset(self) -> None:
        for _, buffer in self.state.named_tensors():
            buffer.zero_()
        self.positions = [0] * len(self.positions)

    @property
    def begins_segment(self) -> bool:
        """Whether the next token of any row is the first of a segment."""
        return any(position % self.segment == 0 for position in self.positions)

    def store(self, state: MemoryState, rows: Sequence[int] | None = None) -> None:
        """Takes the values of a state over, in place: those of all rows, or of these."""
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            if rows is None:
                buffer.copy_(value)
            else:
                buffer[list(rows)] = value.to(buffer.dtype)

    def restore(self, state: MemoryState) -> None:
        """Goes on from a memory, in whatever precision and on whatever device it is.

        A bank that was reduced has the slots of the model again: those that it lacks are empty.
        """
        if not isinstance(state, MemoryState):
            raise ModelError(f"a memory is a MemoryState, not a {type(state).__name__}.")
        given, wanted = len(state.position_B), len(self.positions)
        if given != wanted:
            raise ModelError(f"a memory of {given} sequences cannot go on with {wanted}.")
        if difference := state.origin.difference(self.state.origin.config):
            raise ModelError(f"the memory is of another model: {difference}.")
        self.reset()
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            buffer[tuple(slice(size) for size in value.shape)] = value
        self.positions = state.position_B.tolist()

    def snapshot(self) -> MemoryState:
        """What is remembered now, as a value that stays as it is."""
        return self.state.map(lambda _, buffer: buffer.clone())

    def count(self, counts: list[int]) -> None:
        """The host's side of tokens taken in."""
        self.positions = [before + new for before, new in zip(self.positions, counts, strict=True)]
