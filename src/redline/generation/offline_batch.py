"""Generates the texts of a file of prompts. An interrupted run goes on where it stopped."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict
from torch import nn

from redline.errors import RedlineError
from redline.generation.batch_file import (
    Answer,
    Job,
    JobOptions,
    ResultFile,
    check_jobs,
    options_of,
    read_jobs,
    result_line,
)
from redline.generation.engine import Engine
from redline.generation.request import Finish, Output, Request
from redline.generation.text_stream import TextStream

# The largest number of jobs that are started and not yet written: enough for the engine to fill its rows again whenever
# some of its requests end.
_AHEAD = 1024
# The number of values of each tensor that identify the weights of a model.
_SAMPLES = 256


@dataclass
class _Pending:
    """A job that has been started. If it has `ended`, it waits until the results of all earlier jobs are written."""

    job: Job
    answer: Answer = field(default_factory=Answer)
    text: TextStream | None = None
    stop: list[str] = field(default_factory=list)
    ended: bool = False


class OfflineBatch:
    """Runs the jobs of one file on an engine. `encode` returns the tokens of a job's prompt."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        stop_tokens: frozenset[int],
        encode: Callable[[Job], list[int]],
        defaults: JobOptions,
        model: str,
    ) -> None:
        self._engine, self._tokenizer, self._stop_tokens = engine, tokenizer, stop_tokens
        self._encode, self._defaults, self._model = encode, defaults, model
        # Pending jobs are in the order of the file, because results are written in this order.
        self._pending: deque[_Pending] = deque()
        self._by_id: dict[str, _Pending] = {}

    def run(self, prompts: Path, out: Path, report: Callable[[int, int], None] = lambda done, of: None) -> int:
        """Writes the results to `out`, and returns how many are new.

        `report` is called with the number of jobs that are done and the number of all jobs.

        Raises RedlineError if `out` has results of another model, plan or options.
        """
        if out.exists() and out.samefile(prompts):
            raise RedlineError(f"{str(out)!r} is the file of prompts: choose another file for the results.")
        # Reads the whole file first, so that a wrong line is found before any work is done.
        total = check_jobs(prompts)
        jobs = read_jobs(prompts)
        results = ResultFile(out, jobs, self._settings())
        begun = results.done
        try:
            report(results.done, total)
            first = next(jobs, None)
            todo: Iterator[Job] = iter(()) if first is None else chain((first,), jobs)
            while self._fill(todo) or self._pending:
                for output in self._engine.step() if self._engine.has_work else ():
                    self._take(output)
                while self._pending and self._pending[0].ended:
                    pending = self._pending.popleft()
                    results.write(result_line(pending.job, pending.answer, self._model))
                    results.done += 1
                    report(results.done, total)
        finally:
            for request_id in self._by_id:
                self._engine.abort(request_id)
            results.close()
        return results.done - begun

    def _settings(self) -> dict[str, Any]:
        """Returns what the texts depend on besides the prompts, as JSON values."""
        sampling = asdict(self._defaults.sampling)
        found: dict[str, Any] = {"model": self._model, "plan": str(self._engine.plan)}
        found |= identify(self._engine.model.model)
        return found | {"max_tokens": self._defaults.max_tokens} | sampling

    def _fill(self, todo: Iterator[Job]) -> bool:
        """Starts as many jobs as are useful; returns whether any was started."""
        started = False
        while len(self._pending) < _AHEAD and (job := next(todo, None)) is not None:
            started = True
            self._start(job)
        return started

    def _start(self, job: Job) -> None:
        pending, request_id = _Pending(job), f"job-{job.number}"
        self._pending.append(pending)
        try:
            options, tokens = options_of(job, self._defaults), self._encode(job)
            stops = frozenset() if options.ignore_eos else self._stop_tokens
            pending.text, pending.stop = TextStream(self._tokenizer, tokens), options.stop
            pending.answer.prompt_tokens = len(tokens)
            self._engine.submit(
                Request(
                    request_id,
                    tokens,
                    options.max_tokens,
                    options.sampling,
                    stops,
                    options.min_tokens,
                    grammar=options.grammar,
                )
            )
            self._by_id[request_id] = pending
        except RedlineError as error:
            pending.answer.error, pending.ended = str(error), True

    def _take(self, output: Output) -> None:
        pending = self._by_id.get(output.id)
        if pending is None or pending.text is None:
            return
        answer = pending.answer
        answer.tokens += len(output.tokens)
        answer.text += "".join(map(pending.text.push, output.tokens))
        if output.finish is not None:
            answer.text += pending.text.finish()
            answer.reason = output.finish.value
            answer.error = output.error if output.finish == Finish.ERROR else ""
        places = [place for text in pending.stop if (place := answer.text.find(text)) >= 0]
        if places:
            answer.text, answer.reason = answer.text[: min(places)], Finish.STOP.value
        if places or output.finish is not None:
            pending.ended = True
            del self._by_id[output.id]
            self._engine.abort(output.id)


def identify(model: nn.Module) -> dict[str, str]:
    """Returns the precision of a model, and a digest of its names, its shapes and some values of each tensor."""
    digest, precision = hashlib.sha256(), ""
    for name, value in model.state_dict().items():
        for tensor in _plain_tensors(value):
            if tensor.is_floating_point():
                precision = precision or str(tensor.dtype).removeprefix("torch.")
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].contiguous().cpu()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return {"precision": precision, "weights": digest.hexdigest()[:16]}


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that a value consists of. A quantized tensor, for example, consists of several."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif type(value) in (torch.Tensor, nn.Parameter):
        yield value
