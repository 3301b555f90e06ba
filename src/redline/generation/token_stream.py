"""Streams the tokens of several prompts, one token per row at a time, and collects them into completions."""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redline.errors import ModelError, RedlineError
from redline.generation.engine import NOT_FINITE, Engine
from redline.generation.request import Finish, Output, Request


@dataclass
class Completion:
    """The tokens of one row without the stop token.

    `reason` is the value of `Finish` that says why the row ended, or None while the row continues.

    `state` is the memory state after the tokens, if `generate` was given a state.
    """

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    state: Any = field(default=None, compare=False, repr=False)


@dataclass
class _Row:
    """The tokens of a row that the engine has generated and the stream has not yet returned, and how the row ended."""

    tokens: deque[int] = field(default_factory=deque)
    finish: Finish | None = None
    error: str = ""


class Outputs:
    """Steps an engine, and adds the outputs to the rows of their requests, so that streams can share the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._rows: dict[str, _Row] = {}

    def start(self, request: Request, state: Any) -> _Row:
        self.engine.submit(request, state)
        self._rows[request.id] = row = _Row()
        return row

    def step(self) -> None:
        for output in self.engine.step():
            self._take(output)

    def drop(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self.engine.abort(request_id)

    def _take(self, output: Output) -> None:
        row = self._rows.get(output.id)
        if row is not None:
            row.tokens.extend(output.tokens)
            row.finish, row.error = output.finish, output.error


class TokenStream:
    """An iterator over tuples with the next token of each row; None stands for a row that has ended.

    The stream can be closed early (`close`, or leaving a `with` block). Several streams of one engine can run at once.
    """

    def __init__(self, outputs: Outputs, requests: Sequence[Request], states: Sequence[Any] = ()) -> None:
        self.completions = [Completion() for _ in requests]
        self.prefill_s = 0.0
        self.step_s: list[float] = []
        self._outputs, self._requests = outputs, requests
        # The memory state of each row: the state it was given, or its final state after it has ended.
        self._states = list(states)
        self._running: dict[int, _Row] = {}
        self._tokens = self._run()

    @property
    def state(self) -> Any:
        """The memory state after the prompts and the tokens generated so far, without stop tokens."""
        if not self._states:
            raise RedlineError("this stream has no state: pass state=engine.new_state(rows).")
        states = [self._state_of(index) for index in range(len(self._states))]
        return states[0].stack(states)

    def __iter__(self) -> Iterator[tuple[int | None, ...]]:
        return self

    def __next__(self) -> tuple[int | None, ...]:
        try:
            return next(self._tokens)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._tokens.close()
        for index in list(self._running):
            self._end(index)

    def _state_of(self, index: int) -> Any:
        row = self._running.get(index)
        if row is not None and row.finish is None:
            return self._outputs.engine.state(self._requests[index].id)
        return self._states[index]

    def _end(self, index: int) -> None:
        """Keeps the state of a row, and ends the row if it is still running."""
        row, request_id = self._running[index], self._requests[index].id
        if self._states and row.finish is None:
            self._states[index] = self._state_of(index)
        elif self._states and row.finish is not Finish.ERROR:
            self._states[index] = self._outputs.engine.take_state(request_id)
        del self._running[index]
        self._outputs.drop(request_id)

    def _run(self) -> Generator[tuple[int | None, ...], None, None]:
        last, first = time.perf_counter(), True
        for index, request in enumerate(self._requests):
            self._running[index] = self._outputs.start(request, self._states[index] if self._states else None)
        while self._running:
            while not all(row.tokens or row.finish for row in self._running.values()):
                self._outputs.step()
            now = time.perf_counter()
            if first:
                self.prefill_s, first = now - last, False
            else:
                self.step_s.append(now - last)
            last = now
            self._check()
            row = self._next_row()
            if any(token is not None for token in row):
                yield row

    def _next_row(self) -> tuple[int | None, ...]:
        tokens: list[int | None] = [None] * len(self.completions)
        for index, row in list(self._running.items()):
            completion = self.completions[index]
            if row.tokens:
                tokens[index] = token = row.tokens.popleft()
                completion.tokens.append(token)
            if not row.tokens and row.finish is not None:
                completion.reason = row.finish.value
                self._end(index)
        return tuple(tokens)

    def _check(self) -> None:
        """Raises if a row ended with an error instead of its next token."""
        failed = {index: row.error for index, row in self._running.items() if row.error and not row.tokens}
        if not failed:
            return
        error = next(iter(failed.values()))
        if error == NOT_FINITE and len(self.completions) > 1:
            rows = f"{'row' if len(failed) == 1 else 'rows'} {', '.join(map(str, failed))}"
            error = error.replace("not finite", f"not finite in {rows}", 1)
        raise ModelError(error)
