"""Streams the tokens of one batch, and collects them into completions."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from redline.errors import ModelError, RedlineError
from redline.generation.language_model import StateCache
from redline.generation.request import SamplingOptions
from redline.generation.sampling import NO_TOKEN
from redline.generation.static_batch.session import Session, read_on
from redline.generation.token_stream import Completion

Reason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Batch:
    """Prompts and settings of a stream. A row that reaches `limit` tokens ends with the reason `limit_reason`.

    `chunk` is the number of prompt tokens per prefill call.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingOptions
    limit: int
    limit_reason: Reason
    stop_tokens: frozenset[int]
    chunk: int


class TokenStream:
    """An iterator over tuples with the next token of each row; None stands for a row that has ended.

    The stream can be closed early (`close`, or leaving a `with` block); the next stream then reuses the session.
    """

    def __init__(self, session: Session, request: Batch, release: Callable[[], None], state: Any = None) -> None:
        self.completions = [Completion() for _ in request.prompts]
        self.prefill_s = 0.0
        self.step_s: list[float] = []
        self._release: Callable[[], None] | None = release
        # The memory state before the prompts; the prefill replaces it by the state after them.
        self._before = state
        self._read_on = partial(read_on, session.model, chunk=request.chunk, device=session.device)
        self._tokens = self._run(session, request)

    @property
    def state(self) -> Any:
        """The memory state after the prompts and the tokens generated so far, without stop tokens.

        Computed by a second pass over the tokens, because the cache also holds tokens generated after a row ended.
        """
        if self._before is None:
            raise RedlineError("this stream has no state: pass state=engine.new_state(rows).")
        return self._read_on(self._before, [completion.tokens for completion in self.completions])

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
        release, self._release = self._release, None
        if release is not None:
            release()

    def _run(self, session: Session, request: Batch) -> Generator[tuple[int | None, ...], None, None]:
        begun, limit = time.perf_counter(), request.limit
        session.start(request.prompts, request.sampling, request.chunk, self._before)
        if self._before is not None:
            self._before = cast(StateCache, session.cache).snapshot()
        sent, last = 1, begun
        for count in range(1, limit + 1):
            while sent < limit and len(session.readout) < session.ahead:
                session.advance()
                sent += 1
            tokens = session.readout.receive()
            now = time.perf_counter()
            if count == 1:
                self.prefill_s = now - begun
            else:
                self.step_s.append(now - last)
            last = now
            self._check(tokens)
            row: list[int | None] = []
            for token, completion in zip(tokens, self.completions, strict=True):
                if completion.reason is None and token in request.stop_tokens:
                    completion.reason = "stop"
                if completion.reason is None:
                    completion.tokens.append(token)
                    row.append(token)
                    if count == limit:
                        completion.reason = request.limit_reason
                else:
                    row.append(None)
            if any(token is not None for token in row):
                yield tuple(row)
            if all(completion.reason for completion in self.completions):
                return

    def _check(self, tokens: Sequence[int]) -> None:
        """Raises if a row that has not ended got NO_TOKEN."""
        pairs = enumerate(zip(tokens, self.completions, strict=True))
        rows = [row for row, (token, completion) in pairs if token == NO_TOKEN and completion.reason is None]
        if rows:
            where = f" in {'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows))}" if len(tokens) > 1 else ""
            raise ModelError(
                f"the model's logits are not finite{where}: the weights are damaged, or the precision is too narrow "
                "(try bf16 or fp32)."
            )
