"""Describes what one step of the engine computes: plain data that the scheduler creates and the runner reads."""

from dataclasses import dataclass, field

from redline.generation.sequence import Sequence


@dataclass(frozen=True)
class PlannedRow:
    """Tokens `start` to `start + count - 1` of a sequence, which one step computes.

    `samples` is the number of tokens that the step samples for the sequence: 0 if some of its tokens remain uncomputed,
    otherwise 1 after the last token and 1 after each of the `drafts`. `row` is the sequence's row in the device state
    while it runs. `generated` is the number of tokens sampled before this step.
    """

    sequence: Sequence
    row: int
    start: int
    count: int
    samples: int
    generated: int
    drafts: tuple[int, ...] = ()

    def input_tokens(self) -> list[int]:
        """Returns the tokens of the step. −1 stands for a sampled token that the host has not read."""
        known = self.sequence.tokens[self.start : self.start + self.count - len(self.drafts)]
        missing = self.count - len(self.drafts) - len(known)
        return [*known, *[-1] * missing, *self.drafts]


@dataclass
class StepPlan:
    """The rows of a step; rows with one token come first. `admitted` are the sequences that got a row in this step."""

    rows: list[PlannedRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token and samples."""
        return all(row.count == 1 and row.samples == 1 for row in self.rows)
