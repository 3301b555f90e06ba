"""A memory model's state in buffers that stay where they are, for steps that are recorded once and replayed."""

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

    def store(self, state: MemoryState) -> None:
        """Takes the values of a state over, in place."""
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            buffer.copy_(value)

    def store_row(self, row: int, state: MemoryState) -> None:
        for (_, buffer), (_, value) in zip(self.state.named_tensors(), state.named_tensors(), strict=True):
            buffer[row : row + 1].copy_(value)

    def count(self, counts: list[int]) -> None:
        """The host's side of tokens taken in."""
        self.positions = [before + new for before, new in zip(self.positions, counts, strict=True)]
