"""The figures of one level of load: percentiles of latencies, throughput, goodput, and what went wrong."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from redline.errors import RedlineError
from redline.notation import parse_seconds
from redline.serving.load.arrivals import Load
from redline.serving.load.outcome import Outcome, Status

LIMITS = ("ttft", "tpot", "gap", "e2e")
_MOST_ERRORS = 5


@dataclass(frozen=True)
class Spread:
    """Percentiles in seconds, interpolated between the two nearest values; `count` is the number of values."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    most_s: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        found = sorted(value for value in values if value is not None)
        if not found:
            return None
        p50_s, p95_s, p99_s = (percentile(found, share) for share in (0.5, 0.95, 0.99))
        return cls(len(found), sum(found) / len(found), p50_s, p95_s, p99_s, found[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the value below which this share of the sorted values lies, interpolated linearly.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Limits:
    """The latencies that a good request keeps, in seconds: a request that exceeds one does not count as goodput.

    `gap` is the longest interval between two chunks of an answer.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Limits":
        """Parses `ttft=500ms,tpot=50ms`."""
        found: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if not equals or name.strip() not in LIMITS:
                raise RedlineError(f"{part!r} is not a limit: write NAME=TIME, with a name of {', '.join(LIMITS)}.")
            found[f"{name.strip()}_s"] = parse_seconds(value)
        return cls(**found)

    def __bool__(self) -> bool:
        return self != Limits()

    def are_kept(self, outcome: Outcome) -> bool:
        if outcome.status is not Status.DONE:
            return False
        # An answer without a token has no time to the first one.
        ttft_s = outcome.ttft_s if outcome.ttft_s is not None else outcome.e2e_s
        pairs = (
            (ttft_s, self.ttft_s),
            (outcome.tpot_s or 0.0, self.tpot_s),
            (max(outcome.gaps_s, default=0.0), self.gap_s),
            (outcome.e2e_s, self.e2e_s),
        )
        return all(limit is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True)
class Level:
    """`duration_s` is the time from the first request to the end of the last one; rates are averages over this time.

    Latencies are those of complete answers. `itl` has the intervals between chunks of these answers; `tpot` has, for
    each answer, the mean time per token. `late` says how late the client sent its requests: if `late` is large,
    the client was the bottleneck. Numbers of tokens come from the server's `usage`; `counted` is the number of complete
    answers for which the server sent it.
    """

    load: Load
    duration_s: float
    requests: int
    done: int
    rejected: int
    failed: int
    abandoned: int
    counted: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    chunks: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    rejection: Spread | None
    late: Spread | None
    most_running: int
    good: int | None = None
    goodput_per_s: float | None = None
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that the server found in its prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_chunk(self) -> float:
        return self.output_tokens / self.chunks if self.chunks else 0.0


def summarize(load: Load, outcomes: Sequence[Outcome], limits: Limits) -> Level:
    if not outcomes:
        raise RedlineError("no request was sent: give more requests or a longer duration.")
    done = [outcome for outcome in outcomes if outcome.status is Status.DONE]
    counts = Counter(outcome.status for outcome in outcomes)
    duration_s = max(outcome.ended_s for outcome in outcomes) - min(outcome.due_s for outcome in outcomes)
    counted = [outcome for outcome in done if outcome.output_tokens is not None]
    prompt_tokens = sum(outcome.prompt_tokens or 0 for outcome in counted)
    output_tokens = sum(outcome.output_tokens or 0 for outcome in counted)
    good = sum(map(limits.are_kept, done)) if limits else None
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    return Level(
        load=load,
        duration_s=duration_s,
        requests=len(outcomes),
        done=counts[Status.DONE],
        rejected=counts[Status.REJECTED],
        failed=counts[Status.FAILED],
        abandoned=counts[Status.ABANDONED],
        counted=len(counted),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(outcome.cached_tokens for outcome in counted),
        chunks=sum(outcome.chunks for outcome in counted),
        requests_per_s=len(done) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        ttft=Spread.of(outcome.ttft_s for outcome in done),
        itl=Spread.of(gap for outcome in done for gap in outcome.gaps_s),
        tpot=Spread.of(outcome.tpot_s for outcome in done),
        e2e=Spread.of(outcome.e2e_s for outcome in done),
        rejection=Spread.of(outcome.e2e_s for outcome in outcomes if outcome.status is Status.REJECTED),
        late=Spread.of(outcome.sent_s - outcome.due_s for outcome in outcomes),
        most_running=max((count for _, count in running_over_time(outcomes)), default=0),
        good=good,
        goodput_per_s=None if good is None else good * per_s,
        errors=dict(errors.most_common(_MOST_ERRORS)),
    )


def running_over_time(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Returns how many requests were sent and not yet ended, at each time at which this number changes."""
    changes = [(outcome.sent_s, 1) for outcome in outcomes] + [(outcome.ended_s, -1) for outcome in outcomes]
    running, found = 0, []
    # If a request ends at the time when another starts, sorting puts the end first, so that they do not count as
    # running at the same time.
    for at_s, change in sorted(changes):
        running += change
        found.append((at_s, running))
    return found
