"""What happened to one request, as its client saw it."""

from enum import StrEnum

from msgspec import Struct


class Status(StrEnum):
    DONE = "done"
    REJECTED = "rejected"  # 429 or 503: the server said that it is too busy
    FAILED = "failed"
    ABANDONED = "abandoned"  # the client left on purpose


class Outcome(Struct, frozen=True, kw_only=True):
    """All times are seconds on the clock of the run; a time that did not happen is None.

    `due_s` is when the request should have been sent. Latencies start there, so that a client that falls behind makes
    a result worse and never better. `gaps_s` are the intervals between chunks with text; a chunk may hold several
    tokens. Numbers of tokens come from the server's `usage`, and are None if the server did not send it.
    """

    number: int
    status: Status
    due_s: float
    sent_s: float
    ended_s: float
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0
    finish: str = ""
    http_status: int | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """The time to the first token."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first."""
        if self.first_s is None or self.last_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def chunks(self) -> int:
        return 0 if self.first_s is None else len(self.gaps_s) + 1
