"""Manages the states of requests that continue a state of a model with neural memory, and stores them at the end.

The caller gives the state, or names a session whose state is in a file. A step of such a request is launched only after
the host has read its last token. The state of its row therefore contains the known tokens, possibly without the last.
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
    """Loads and stores the states of requests that `runner` runs. Sessions need a `folder`."""

    def __init__(
        self, model: PlannedModel, runner: Any, folder: str | Path | None, most_bytes: int, most_age_s: float
    ) -> None:
        self._model, self._runner = model, runner
        self._store: SessionStore | None = None
        if folder is not None:
            self._memory_model()
            self._store = SessionStore(Path(folder), most_bytes, most_age_s)
        # `_before`: the initial state of each request (None: empty). `_after`: the final states of ended requests whose
        # callers gave a state.
        self._before: dict[Sequence, Any] = {}
        self._after: dict[str, Any] = {}
        self._in_use: set[tuple[str, str]] = set()

    def new_state(self, batch: int) -> Any:
        return self._memory_model().new_state(batch)

    def open(self, sequence: Sequence, state: Any) -> None:
        """Loads the state that the request continues, if any, and marks its session as in use."""
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
        """Sets `lead`, so that chunks start where captured pieces can. Raises if the state does not fit the model."""
        if self._before[sequence] is not None:
            cache: Any = self._model.new_cache(1, 0)
            cache.restore(self._before[sequence])
            sequence.lead = self._model.until_piece(cache) or 0

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Passes the initial states of requests that start in the next step to the runner."""
        if isinstance(self._runner, StateRunner):
            self._runner.starting = {one.row: self._before[one] for one in sequences if one in self._before}

    def current(self, sequence: Sequence) -> Any:
        """Returns a copy of the state after the known tokens of a request, or its initial state if it has no row."""
        if sequence.row < 0:
            return self._before[sequence]
        return self._runner.state_after(sequence.row, sequence.tokens[sequence.computed :])

    def finish(self, sequence: Sequence, row: int) -> None:
        """Stores the state of a request that has ended. Must be called before its row is given to another request."""
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
        """Forgets a request without storing its state, so its session keeps the earlier one."""
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
