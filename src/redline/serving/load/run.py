"""Runs one level of load: sends requests when they are due, and collects their outcomes."""

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice, takewhile
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


@dataclass(frozen=True)
class Part:
    """The share of the requests that process number `index` of `of` processes sends.

    At a given rate, the process sends every `of`-th request from number `index` on. With a fixed number of clients, it
    runs every `of`-th client from number `index` on.
    """

    index: int = 0
    of: int = 1


async def run_level(
    target: Target,
    prompts: Prompts,
    load: Load,
    extent: Extent,
    first: int = 0,
    report: Callable[[Progress], None] = lambda _: None,
    *,
    part: Part | None = None,
    wait_for_others: Callable[[], object] | None = None,
) -> list[Outcome]:
    """Returns the outcomes in the order of their numbers, which start at `first`.

    `wait_for_others` is called when everything is prepared, and returns when the other processes are ready as well.
    """
    async with target.session() as session:
        level = _Level(session, target, prompts, extent, first, report, part or Part(), wait_for_others)
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
        part: Part,
        wait_for_others: Callable[[], object] | None,
    ) -> None:
        self._session, self._target, self._prompts, self._extent = session, target, prompts, extent
        self._first, self._report, self._part, self._wait_for_others = first, report, part, wait_for_others
        self._now_s = asyncio.get_running_loop().time
        self._progress = Progress()
        self.outcomes: list[Outcome] = []

    async def send_at_times(self, load: Load) -> None:
        """Sends every request at its time, however many are still running."""
        last_s = self._extent.duration_s if self._extent.duration_s is not None else math.inf
        offsets_s = takewhile(lambda offset_s: offset_s < last_s, arrival_times(load, self._extent.seed))
        numbered = islice(enumerate(offsets_s, self._first), self._extent.requests)
        # Prompts are made before the first request, because making a long one would delay others.
        planned = [
            (number, offset_s, self._prompts(number))
            for number, offset_s in islice(numbered, self._part.index, None, self._part.of)
        ]
        began_s = self._begin()
        async with asyncio.TaskGroup() as group:
            for number, offset_s, prompt in planned:
                await asyncio.sleep(max(0.0, began_s + offset_s - self._now_s()))
                group.create_task(self._send(number, prompt, began_s + offset_s))

    async def send_from_clients(self, clients: int) -> None:
        """Lets each client send its next request when it has the answer to the one before."""
        extent, part = self._extent, self._part
        places = count() if extent.requests is None else range(extent.requests)
        # A process has as many requests as its clients would have if all clients took turns.
        numbers = (self._first + place for place in places if place % clients % part.of == part.index)
        made = ((number, self._prompts(number)) for number in numbers)
        # If the number of requests is given, all prompts are made now. Otherwise, each prompt is made when a client
        # is ready to send it.
        pairs = made if extent.requests is None else iter(list(made))
        began_s = self._begin()

        async def client() -> None:
            while extent.duration_s is None or self._now_s() - began_s < extent.duration_s:
                pair = next(pairs, None)
                if pair is None:
                    return
                await self._send(*pair, self._now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(part.index, min(clients, extent.requests or clients), part.of):
                group.create_task(client())

    def _begin(self) -> float:
        if self._wait_for_others is not None:
            self._wait_for_others()
        return self._now_s()

    async def _send(self, number: int, prompt: dict[str, Any], due_s: float) -> None:
        self._progress.sent += 1
        outcome = await send(self._session, self._target, number, prompt, due_s, self._extent.abandon_after(number))
        self.outcomes.append(outcome)
        self._progress.ended += 1
        self._progress.output_tokens += outcome.output_tokens or 0
        self._report(self._progress)
