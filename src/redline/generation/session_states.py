"""The states of requests that continue a state of a model with neural memory, and store it at the end.

The state is a caller's, or that of a session in a folder. Such requests never run ahead of what the host has read, so
the state of their row is that of their known tokens, possibly without the last one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from redline.errors import ModelError, RedlineError
from redline.generation.language_model import MemoryModel
from redline.generation.planned import PlannedModel
from redline.generation.sequence import Sequence
from redline.generation.sessions import SessionStore
from redline.generation.state_runner import StateRunner

_NO_FOLDER = "this engine stores no sessions: give it a folder for them (`redline serve --sessions FOLDER`)."


class SessionStates:
    """`runner` runs the requests; sessions need a `folder`."""

    def __init__(
        self, model: PlannedModel, runner: Any, folder: str | Path | None, most_bytes: int, most_age_s: float
    ) -> None:
        self._model, self._runner = model, runner
        self._store: SessionStore | None = None
        if folder is not None:
            self._memory_model()
            self._store = SessionStore(Path(folder), most_bytes, most_age_s)
        # The state before each request, None for an empty one, and the states after texts of callers that gave one.
        self._before: dict[Sequence, Any] = {}
        self._after: dict[str, Any] = {}
        self._in_use: set[tuple[str, str]] = set()

    def new_state(self, batch: int) -> Any:
        return self._memory_model().new_state(batch)

    def open(self, sequence: Sequence, state: Any) -> None:
        """Loads the state that the request continues."""
        session = sequence.request.session
        if session is None and state is None:
            return
        model = self._memory_model()
        if session is None:
            self._before[sequence] = state
            self._align(sequence)
            return
        if self._store is None:
            raise RedlineError(_NO_FOLDER)
        key = (sequence.request.salt, session)
        if key in self._in_use:
            raise RedlineError(f"the session {session!r} is in use by another request: wait until it has ended.")
        self._before[sequence] = self._store.load(*key, model.new_state())
        self._align(sequence)
        self._in_use.add(key)

    def _align(self, sequence: Sequence) -> None:
        """Lets the chunks of the prompt begin where a captured piece can. Raises if the state cannot be continued."""
        if self._before[sequence] is not None:
            cache: Any = self._model.new_cache(1, 0)
            cache.restore(self._before[sequence])
            sequence.lead = self._model.until_piece(cache) or 0

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Remembers which requests start in the next step, so that the runner sets their states."""
        if isinstance(self._runner, StateRunner):
            self._runner.starting = {one.row: self._before[one] for one in sequences if one in self._before}

    def current(self, sequence: Sequence) -> Any:
        """Returns a copy of the state after the known tokens of a request; before it runs, the one it was given."""
        if sequence.row < 0:
            return self._before[sequence]
        return self._runner.state_after(sequence.row, sequence.tokens[sequence.computed :])

    def finish(self, sequence: Sequence, row: int) -> None:
        """Stores the state of a request that has ended, whose row has not been given to another one yet."""
        if sequence not in self._before:
            return
        state = self._runner.state_after(row, sequence.tokens[sequence.computed :])
        session, salt = sequence.request.session, sequence.request.salt
        self.close(sequence)
        if session is None:
            self._after[sequence.request.id] = state
        elif self._store is not None:
            self._store.save(salt, session, state)

    def close(self, sequence: Sequence) -> None:
        """Forgets a request; its session stays as it was."""
        if sequence in self._before:
            del self._before[sequence]
            self._in_use.discard((sequence.request.salt, sequence.request.session or ""))

    def take(self, request_id: str) -> Any:
        return self._after.pop(request_id)

    def delete(self, salt: str, session: str) -> bool:
        if self._store is None:
            raise RedlineError(_NO_FOLDER)
        if (salt, session) in self._in_use:
            raise RedlineError(f"the session {session!r} is in use by a request: wait until it has ended.")
        return self._store.delete(salt, session)

    def _memory_model(self) -> MemoryModel:
        if not isinstance(self._model.model, MemoryModel):
            raise ModelError("a state needs a model with neural memory; this model has none.")
        return self._model.model
