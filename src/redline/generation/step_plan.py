"""What one step of the engine computes: plain data, made by the scheduler and read by the runner."""

from dataclasses import dataclass, field

from redline.generation.sequence import Sequence


@dataclass(frozen=True)
class PlannedRow:
    """Tokens `start` to `start + count - 1` of a sequence. `samples` counts the tokens that the step samples for it.

    A sequence samples after its last token, and with `drafts` also after the token before each draft. `row` is the
    sequence's row in the device state while it runs. `generated` is the number of tokens sampled before this step.
    """

    sequence: Sequence
    row: int
    start: int
    count: int
    samples: int
    generated: int
    drafts: tuple[int, ...] = ()

    def input_tokens(self) -> list[int]:
        """Returns the tokens of the step; −1 stands for one whose value only the device knows."""
        known = self.sequence.tokens[self.start : self.start + self.count - len(self.drafts)]
        missing = self.count - len(self.drafts) - len(known)
        return [*known, *[-1] * missing, *self.drafts]


@dataclass
class StepPlan:
    """The rows of a step, those of one token first. `admitted` are the sequences that got a row in this step."""

    rows: list[PlannedRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Returns whether every row has one token and samples."""
        return all(row.count == 1 and row.samples == 1 for row in self.rows)
