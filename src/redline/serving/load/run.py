"""Runs one level of load: sends requests when they are due, and collects their outcomes."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as count_up
from itertools import islice, takewhile
from typing import Any

from aiohttp import ClientSession

from redline.errors import RedlineError
from redline.serving.load.arrivals import Load, arrival_times
from redline.serving.load.client import Target, send
from redline.serving.load.outcome import Outcome
from redline.serving.load.prompts import Prompts

# A client that leaves does so after at most this many chunks.
_MOST_CHUNKS_BEFORE_LEAVING = 32


@dataclass(frozen=True)
class Extent:
    """How long a level lasts: up to `requests` requests, and no new ones after `duration_s`.

    `abandon_share` is the share of clients that leave before their answer is complete.
    """

    requests: int | None = None
    duration_s: float | None = None
    abandon_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise RedlineError("a level needs a number of requests or a duration.")
        if self.requests is not None and self.requests < 1:
            raise RedlineError(f"the number of requests must be at least 1, not {self.requests}.")
        if not 0 <= self.abandon_share <= 1:
            raise RedlineError(f"the share of clients that leave must be from 0 to 1, not {self.abandon_share:g}.")

    def abandon_after(self, number: int) -> int | None:
        draw = random.Random(f"{self.seed}/{number}/abandon")
        return draw.randint(1, _MOST_CHUNKS_BEFORE_LEAVING) if draw.random() < self.abandon_share else None


@dataclass
class Progress:
    """Counts of the running level."""

    sent: int = 0
    ended: int = 0
    output_tokens: int = 0

    @property
    def running(self) -> int:
        return self.sent - self.ended


async def run_level(
    target: Target,
    prompts: Prompts,
    load: Load,
    extent: Extent,
    first: int = 0,
    report: Callable[[Progress], None] = lambda _: None,
) -> list[Outcome]:
    """Returns the outcomes in the order of their numbers, which start at `first`."""
    async with target.session() as session:
        level = _Level(session, target, prompts, extent, first, report)
        if load.rate is not None:
            await level.send_at_times(load)
        else:
            await level.send_from_clients(load.concurrency or 1)
    return sorted(level.outcomes, key=lambda outcome: outcome.number)


class _Level:
    def __init__(
        self,
        session: ClientSession,
        target: Target,
        prompts: Prompts,
        extent: Extent,
        first: int,
        report: Callable[[Progress], None],
    ) -> None:
        self._session, self._target, self._prompts, self._extent = session, target, prompts, extent
        self._first, self._report = first, report
        self._now_s = asyncio.get_running_loop().time
        self._progress = Progress()
        self.outcomes: list[Outcome] = []

    async def send_at_times(self, load: Load) -> None:
        """Sends every request at its time, however many are still running."""
        last_s = self._extent.duration_s if self._extent.duration_s is not None else math.inf
        offsets_s = takewhile(lambda offset_s: offset_s < last_s, arrival_times(load, self._extent.seed))
        # Prompts are made before the first request, because making a long one would delay others.
        planned = [
            (offset_s, self._prompts(self._first + count))
            for count, offset_s in enumerate(islice(offsets_s, self._extent.requests))
        ]
        began_s = self._now_s()
        async with asyncio.TaskGroup() as group:
            for count, (offset_s, prompt) in enumerate(planned):
                await asyncio.sleep(max(0.0, began_s + offset_s - self._now_s()))
                group.create_task(self._send(count, prompt, began_s + offset_s))

    async def send_from_clients(self, clients: int) -> None:
        """Lets each client send its next request when it has the answer to the one before."""
        extent = self._extent
        # Without a number of requests, each prompt is made when its client is ready.
        made = map(self._prompts, range(self._first, self._first + extent.requests)) if extent.requests else None
        pairs = enumerate(list(made) if made else map(self._prompts, count_up(self._first)))
        began_s = self._now_s()

        async def client() -> None:
            while extent.duration_s is None or self._now_s() - began_s < extent.duration_s:
                pair = next(pairs, None)
                if pair is None:
                    return
                await self._send(*pair, self._now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, extent.requests or clients)):
                group.create_task(client())

    async def _send(self, count: int, prompt: dict[str, Any], due_s: float) -> None:
        self._progress.sent += 1
        number = self._first + count
        abandon_after = self._extent.abandon_after(number)
        outcome = await send(self._session, self._target, number, prompt, due_s, abandon_after)
        self.outcomes.append(outcome)
        self._progress.ended += 1
        self._progress.output_tokens += outcome.output_tokens or 0
        self._report(self._progress)
