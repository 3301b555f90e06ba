"""Collects the outputs of the engine for one HTTP request until its handler takes them.

A handler that is slower than the engine takes the outputs of several steps at once, so the server sends fewer and
larger chunks under load instead of falling behind.
"""

import asyncio

from redline.generation.request import Output
from redline.serving.errors import ApiError


class Mailbox:
    """Passes outputs from the task that reads from the engine to the task that handles the HTTP request.

    With `has_grammar`, an engine error is reported as an invalid grammar, because the client wrote the grammar.
    """

    def __init__(self, ids: tuple[str, ...], has_grammar: bool) -> None:
        self.ids, self.has_grammar = ids, has_grammar
        self._outputs: list[Output] = []
        self._error: ApiError | None = None
        self._arrived = asyncio.Event()
        self.is_silent = True

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self.is_silent = False
        self._arrived.set()

    def fail(self, error: ApiError) -> None:
        """Makes `take` raise this error once the outputs before it are taken."""
        self._error = self._error or error
        self._arrived.set()

    def ping(self) -> None:
        """Wakes the handler if nothing has arrived since the last ping."""
        if self.is_silent:
            self._arrived.set()
        self.is_silent = True

    async def take(self) -> list[Output]:
        """Waits for outputs, and returns all since the last call, or an empty list after a ping.

        Raises the error of `fail` once there are no more outputs.
        """
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._outputs = self._outputs, []
        if self._error is not None:
            if not taken:
                raise self._error
            self._arrived.set()
        return taken
