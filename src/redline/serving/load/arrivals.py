"""When requests arrive: at a rate, whatever the server does (open loop), or from a fixed number of clients."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from redline.errors import RedlineError

_HIGHEST_RATE, _MOST_CLIENTS = 100_000, 100_000


@dataclass(frozen=True)
class Load:
    """One level of load: `rate` requests per second, or `concurrency` clients that each wait for their answers.

    Intervals between arrivals are gamma-distributed with the shape `burstiness`: 1 is a Poisson process, less than 1
    has bursts, and infinity gives equal intervals.
    """

    rate: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise RedlineError("a load has either a rate or a concurrency.")
        if self.rate is not None and not 0 < self.rate <= _HIGHEST_RATE:
            raise RedlineError(f"a rate must be above 0 and at most {_HIGHEST_RATE:,} requests/s, not {self.rate:g}.")
        if self.concurrency is not None and not 1 <= self.concurrency <= _MOST_CLIENTS:
            raise RedlineError(f"the concurrency must be from 1 to {_MOST_CLIENTS:,}, not {self.concurrency}.")
        if not self.burstiness > 0:
            raise RedlineError(f"the burstiness must be above 0, not {self.burstiness:g}.")

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} client{'s' if self.concurrency != 1 else ''}"

    @property
    def amount(self) -> float:
        """The position of this level on the x axis."""
        return self.rate if self.rate is not None else float(self.concurrency or 0)


def arrival_times(load: Load, seed: int) -> Iterator[float]:
    """Yields the seconds from the start at which requests arrive, without end; the first arrives at 0."""
    if load.rate is None:
        raise RedlineError("only a load with a rate has arrival times.")
    draw, now_s, mean_s = random.Random(seed), 0.0, 1 / load.rate
    while True:
        yield now_s
        now_s += mean_s if load.burstiness == float("inf") else _gamma(draw, load.burstiness, mean_s)


def _gamma(draw: random.Random, shape: float, mean: float) -> float:
    return draw.gammavariate(shape, mean / shape)
