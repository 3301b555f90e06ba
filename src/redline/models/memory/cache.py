"""The neural memory's state in static buffers, as replaying a captured CUDA graph requires."""

from collections.abc import Sequence

from redline.errors import ModelError
from redline.models.memory.state import MemoryState


class MemoryCache:
    """`positions` copies the position of each row on the host, so that reading it needs no synchronization."""

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
        """Returns whether the next token of any row is the first of a segment."""
        return any(position % self.segment == 0 for position in self.positions)

    def store(self, state: MemoryState, rows: Sequence[int] | None = None) -> None:
        """Copies a state into the buffers: all rows, or only `rows`."""
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            if rows is None:
                buffer.copy_(value)
            else:
                buffer[list(rows)] = value.to(buffer.dtype)

    def restore(self, state: MemoryState) -> None:
        """Continues from a saved state of any dtype and device.

        A slot bank that was reduced gets the model's number of slots again; the added ones are empty.
        """
        if not isinstance(state, MemoryState):
            raise ModelError(f"the state must be a MemoryState, not a {type(state).__name__}.")
        given, wanted = len(state.position_B), len(self.positions)
        if given != wanted:
            raise ModelError(f"the state holds {given} sequences, but {wanted} were given.")
        if difference := state.origin.difference(self.state.origin.config):
            raise ModelError(f"the state belongs to another model: {difference}.")
        self.reset()
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            buffer[tuple(slice(size) for size in value.shape)] = value
        self.positions = state.position_B.tolist()

    def snapshot(self) -> MemoryState:
        """Returns a copy of the current state."""
        return self.state.map(lambda _, buffer: buffer.clone())

    def advance_positions(self, counts: list[int]) -> None:
        """Adds the number of processed tokens to the host's copy of the positions."""
        self.positions = [before + new for before, new in zip(self.positions, counts, strict=True)]
