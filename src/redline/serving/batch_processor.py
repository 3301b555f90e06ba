"""Generates texts for prompts that several threads submit, in batches on one engine in this process."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from redline.errors import RedlineError
from redline.generation.folder import ModelFolder
from redline.generation.request import Finish, Output, Request, SamplingOptions
from redline.generation.text_generator import GeneratedText
from redline.serving.choice_text import ChoiceText
from redline.serving.engine_worker import Engine
from redline.serving.model_engine import load_engine


@dataclass
class _Job:
    """Holds one prompt from `submit` until its text is complete."""

    request: Request
    text: ChoiceText
    future: "Future[GeneratedText]"
    tokens: list[int]
    arrived_s: float
    pieces: list[str]


class BatchProcessor:
    """Generates texts for prompts that arrive at any time; a context manager, usable from any thread.

    Up to `max_batch_size` texts are generated together. With `dynamic_batching`, a prompt joins the running batch at
    the next step that has room for it. Without `dynamic_batching`, a batch starts when it is full or when its oldest
    prompt has waited for `timeout_ms`, and no prompt joins it until all its texts are complete. `options` are those of
    the engine: device, precision, plan. If `engine` is given, it is used instead of a new engine for the folder, and
    `close` closes it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_batch_size: int = 32,
        timeout_ms: float = 100.0,
        dynamic_batching: bool = True,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        if max_batch_size < 1:
            raise RedlineError(f"max_batch_size must be at least 1, not {max_batch_size}.")
        if timeout_ms < 0:
            raise RedlineError(f"timeout_ms must not be negative, not {timeout_ms}.")
        self._folder = ModelFolder.open(model)
        self._engine = engine or load_engine(str(self._folder.path), max_rows=max_batch_size, **options)[0]
        self._most, self._timeout_s, self._is_dynamic = max_batch_size, timeout_ms / 1000, dynamic_batching
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._numbers = itertools.count()
        self._changed = Condition()
        self._is_closing = False
        self._thread = Thread(target=self._run, name="redline-batches", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: str, *, max_tokens: int = 256, stop: Sequence[str] = (), **sampling: Any
    ) -> "Future[GeneratedText]":
        """Returns a future of the text that continues a prompt; `sampling` are the fields of `SamplingOptions`."""
        options = SamplingOptions(**sampling)
        if max_tokens < 1:
            raise RedlineError(f"max_tokens must be at least 1 token, not {max_tokens}.")
        tokens = self._folder.tokenizer.encode(prompt).ids
        stop_tokens = frozenset(self._folder.stop_tokens)
        request = Request(f"batch-{next(self._numbers)}", tokens, max_tokens, options, stop_tokens)
        text = ChoiceText(self._folder.tokenizer, tokens, tuple(stop))
        job = _Job(request, text, Future(), [], time.monotonic(), [])
        with self._changed:
            if self._is_closing:
                raise RedlineError("the batch processor is closed.")
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def process(self, prompts: Sequence[str], **options: Any) -> list[GeneratedText]:
        """Returns the texts of several prompts, in their order; `options` are those of `submit`."""
        return [future.result() for future in [self.submit(prompt, **options) for prompt in prompts]]

    def close(self) -> None:
        """Stops the thread; texts that are not complete raise an error. May be called repeatedly."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> "BatchProcessor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        error: BaseException = RedlineError("the batch processor was closed.")
        try:
            while self._step():
                pass
        except Exception as failure:
            error = failure
        with self._changed:
            self._is_closing = True
            left = [*self._waiting, *self._running.values()]
        for job in left:
            if not job.future.done():
                job.future.set_exception(error)
        self._engine.close()

    def _step(self) -> bool:
        """Waits for a prompt if none runs, starts the prompts that are due, and runs one step of the engine.

        Returns False if the processor is closing, otherwise True.
        """
        with self._changed:
            while not self._is_closing and not self._running and not (ready := self._ready_count()):
                self._changed.wait(self._until_timeout())
            if self._is_closing:
                return False
            ready = self._ready_count()
            started = [self._waiting.popleft() for _ in range(ready)]
        for job in started:
            self._start(job)
        for output in self._engine.step() if self._engine.has_work else ():
            self._take(output)
        return True

    def _ready_count(self) -> int:
        """Returns the number of waiting prompts that must start now."""
        if self._is_dynamic:
            return min(len(self._waiting), max(0, self._most - len(self._running)))
        is_due = len(self._waiting) >= self._most or (self._until_timeout() or 1.0) <= 0
        return min(len(self._waiting), self._most) if is_due and not self._running else 0

    def _until_timeout(self) -> float | None:
        """Returns the seconds until the timeout of the oldest waiting prompt, or None if no prompt waits."""
        if not self._waiting:
            return None
        return self._waiting[0].arrived_s + self._timeout_s - time.monotonic()

    def _start(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            self._engine.submit(job.request)
        except RedlineError as error:
            job.future.set_exception(error)
            return
        self._running[job.request.id] = job

    def _take(self, output: Output) -> None:
        job = self._running.get(output.id)
        if job is None:
            return
        if output.finish in (Finish.ERROR, Finish.ABORTED):
            del self._running[output.id]
            job.future.set_exception(RedlineError(output.error or "the engine ended the text."))
            return
        job.tokens += output.tokens
        piece = job.text.push(output)
        job.pieces.append(piece.text)
        if piece.finish_reason is None:
            return
        del self._running[output.id]
        if output.finish is None:  # a stop string ended the text, but the engine would continue it
            self._engine.abort(output.id)
        job.future.set_result(GeneratedText("".join(job.pieces), job.tokens, output.finish or Finish.STOP))
