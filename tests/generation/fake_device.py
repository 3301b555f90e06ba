"""A device without a model, for tests of the scheduler: it checks that every step reads what it should read.

A page holds, for each of its places, the tokens from the beginning of the text up to there. The next token is a
function of all tokens before it.
"""

from collections import deque
from typing import Any
from zlib import crc32

from redline.generation.blocks import Blocks
from redline.generation.request import Finish, Request
from redline.generation.scheduler import Limits, Scheduler
from redline.generation.sequence import Sequence
from redline.generation.step_plan import PlannedRow

ALPHABET = 3


def next_token(text: tuple[int, ...]) -> int:
    return crc32(bytes(text)) % ALPHABET


def expected_text(request: Request) -> list[int]:
    """Returns what a request generates alone."""
    text = tuple(request.prompt)
    found: list[int] = []
    while len(found) < request.max_tokens:
        token = next_token(text)
        if token in request.stop_tokens:
            break
        found.append(token)
        text += (token,)
    return found


class FakeDevice:
    """Runs the plans of a scheduler at once, and gives the tokens back `behind` steps later."""

    def __init__(self, blocks: int = 8, size: int = 2, rows: int = 4, drafts: bool = False, **limits: int) -> None:
        given = {"max_rows": rows, "token_budget": 16, "chunk": 8, "prompt_cost": 4} | limits
        self.scheduler = Scheduler(Blocks(blocks, size), Limits(**given), self._draft if drafts else None)
        self.pages: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.last: dict[int, int] = {}
        self.in_flight: deque[list[tuple[PlannedRow, list[int]]]] = deque()
        self.texts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, Finish] = {}
        self.truth: dict[Sequence, tuple[int, ...]] = {}

    def add(self, request: Request, waits: bool = False) -> None:
        sequence = Sequence(request, len(self.requests), request.max_tokens, Finish.LENGTH, waits=waits)
        self.scheduler.add(sequence)
        self.requests[request.id] = request
        self.texts[request.id] = []
        self.truth[sequence] = tuple(request.prompt)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.ended[request_id] = Finish.ABORTED

    def launch(self) -> bool:
        plan = self.scheduler.plan()
        limits = self.scheduler.limits
        assert plan.tokens <= limits.token_budget
        rows = [row.row for row in plan.rows]
        assert len(set(rows)) == len(rows) and all(0 <= row < limits.max_rows for row in rows)
        assert all(0 < row.count <= limits.chunk for row in plan.rows)
        inputs = {row.row: self._inputs(row) for row in plan.rows}
        # Like the kernels, writes everything before it reads anything.
        for row in plan.rows:
            for offset in range(row.count):
                self.pages[self._place(row, row.start + offset)] = self._content(row, offset, inputs[row.row])
        launched = []
        for row in plan.rows:
            for offset in range(-row.start, row.count):
                found = self.pages[self._place(row, row.start + offset)]
                assert found == self._content(row, offset, inputs[row.row]), "a row reads another text's page"
            launched.append((row, self._sample(row, inputs[row.row])))
        if launched:
            self.in_flight.append(launched)
        return bool(launched)

    def _place(self, row: PlannedRow, position: int) -> tuple[int, int]:
        size = self.scheduler.blocks.size
        return row.sequence.blocks[position // size], position % size

    def _inputs(self, row: PlannedRow) -> list[int]:
        return [self.last[row.row] if token < 0 else token for token in row.input_tokens()]

    def _content(self, row: PlannedRow, offset: int, inputs: list[int]) -> tuple[str, tuple[int, ...]]:
        before = self.truth[row.sequence][: row.start]
        return row.sequence.request.salt, (*before, *inputs)[: row.start + offset + 1]

    def _sample(self, row: PlannedRow, inputs: list[int]) -> list[int]:
        text = (*self.truth[row.sequence][: row.start], *inputs)
        assert text[: len(text) - len(row.drafts)] == self.truth[row.sequence][: len(text) - len(row.drafts)]
        tokens = [next_token(text[: len(text) - left]) for left in range(row.samples - 1, -1, -1)]
        if tokens:
            taken = 1
            while taken <= len(row.drafts) and tokens[taken - 1] == row.drafts[taken - 1]:
                taken += 1
            self.truth[row.sequence] += tuple(tokens[:taken])
            self.last[row.row] = tokens[-1]
        return tokens

    def read(self) -> None:
        for row, tokens in self.in_flight.popleft():
            gained = self.scheduler.settle(row, tokens)
            request_id = row.sequence.request.id
            self.texts[request_id] += gained
            if row.sequence.finish is not None and request_id not in self.ended:
                self.ended[request_id] = row.sequence.finish

    def run(self, behind: int = 0) -> None:
        """Steps until everybody has ended. Every step must make progress."""
        while self.scheduler.running or self.scheduler.waiting or self.in_flight:
            launched = self.launch()
            assert launched or self.in_flight, "nothing can run, and nothing is running"
            while len(self.in_flight) > (behind if launched else 0):
                self.read()
            self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.blocks.check(one.blocks for one in scheduler.running)
        rows = [one.row for one in scheduler.running]
        assert len(set(rows)) == len(rows) <= scheduler.limits.max_rows
        assert sorted([*rows, *scheduler._rows]) == list(range(scheduler.limits.max_rows))
        for line in (scheduler.running, scheduler.waiting):
            assert [one.arrival for one in line] == sorted(one.arrival for one in line)
        assert all(one.row < 0 and not one.blocks and not one.computed for one in scheduler.waiting)
        assert {*scheduler.running} | {*scheduler.waiting} == {*scheduler._sequences.values()}

    def check_texts(self) -> None:
        """Everybody that was not aborted has the text that it gets alone; an aborted text is the beginning of it."""
        for request_id, request in self.requests.items():
            expected, found = expected_text(request), self.texts[request_id]
            assert found == (expected[: len(found)] if self.ended[request_id] == Finish.ABORTED else expected)

    def _draft(self, sequence: Any) -> list[int]:
        """Guesses that are right at first and wrong later."""
        text, drafts = tuple(sequence.tokens), []
        for _ in range(len(text) % 4):
            drafts.append(next_token(text))
            text += (drafts[-1],)
        return [*drafts[:-1], (drafts[-1] + len(text)) % ALPHABET] if drafts else []
