"""Measures recall at each text length, the size of the state, and the loss of a text by position."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from redline.errors import ModelError
from redline.evaluation.recall.passkey import Passkey, tokenized_sample
from redline.evaluation.recall.reading import PIECE, Advancing, Cached, pieces, predict
from redline.evaluation.recall.task import IGNORED, Recall, Sample
from redline.evaluation.recall.tasks import name_of
from redline.machine.host_memory import available_host_bytes
from redline.notation import format_bytes

# The default batch size is the largest with at most this many tokens per batch. For a memory model, which reads texts
# in pieces, only the tokens of one piece of each text count.
_TOKENS = 2**16
# A memory model's default batch size has a second limit: the whole texts of a batch have at most this many tokens.
_WAITING = 2**24
# Bytes of host memory per token: the token, its target, and a copy while texts are assembled.
_TOKEN_BYTES = 3 * 8
# The first bucket of positions ends at this position.
_FIRST_BUCKET = 64
# Seeds must be below this limit of torch's generators.
_SEEDS = 2**63
Status = Callable[[str], None]


@dataclass(frozen=True)
class RecallRow:
    """The result of a task at one length. `asked` is the number of questions.

    In text tasks, an answer is right if all its tokens are. `state_bytes` is the size of the model's state or cache for
    one text, after the text's last token.
    """

    task: str
    length: int
    accuracy: float
    asked: int
    state_bytes: int
    seconds: float


@dataclass(frozen=True)
class LossRow:
    """The mean loss of `tokens` tokens at positions `first` to `last`; a position is the number of preceding tokens."""

    first: int
    last: int
    loss: float
    tokens: int


def evaluate(
    model: Cached,
    tasks: Sequence[Recall],
    lengths: Sequence[int],
    samples: int = 64,
    batch: int | None = None,
    device: torch.device | str = "cpu",
    tokenizer: Any = None,
    seed: int = 0,
    status: Status = lambda line: None,
) -> list[RecallRow]:
    """Evaluates every task at every length, on the same samples for every model. Checks all arguments first."""
    check_counts(samples, batch, seed)
    check_tasks(model, tasks, lengths, tokenizer)
    device, rows = torch.device(device), []
    for task, length in product(tasks, lengths):
        name, begun = name_of(task), time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        most = batch or _at_once(model, length)
        right = asked = held = 0
        for done in range(0, samples, most):
            status(f"{name} at {length:,} tokens: {done} of {samples}")
            # Generated one by one, so that the samples do not depend on the batch size.
            count = min(most, samples - done)
            each = [_sample(task, tokenizer, generator, 1, length, model.vocabulary) for _ in range(count)]
            drawn = Sample(torch.cat([one.tokens_BS for one in each]), torch.cat([one.targets_BS for one in each]))
            scores, held = _right(model, drawn, device, whole=isinstance(task, Passkey))
            right, asked = right + int(scores.sum()), asked + len(scores)
        rows.append(RecallRow(name, length, right / asked, asked, held, time.perf_counter() - begun))
    return rows


def check_counts(samples: int, batch: int | None, seed: int) -> None:
    """Raises ModelError for values that `evaluate` does not accept."""
    if samples < 1:
        raise ModelError(f"samples must be at least 1, not {samples}.")
    if batch is not None and batch < 1:
        raise ModelError(f"batch must be at least 1, not {batch}.")
    if not 0 <= seed < _SEEDS:
        raise ModelError(f"seed must be a whole number from 0 to {_SEEDS - 1}, not {seed}.")


def check_tasks(model: Cached, tasks: Sequence[Recall], lengths: Sequence[int], tokenizer: Any) -> None:
    """Raises ModelError for a length or task that `evaluate` cannot run."""
    free_bytes = available_host_bytes()
    for length in lengths:
        if length < 1:
            raise ModelError(f"lengths must be at least 1 token, not {length}.")
        if (least := _TOKEN_BYTES * length) > free_bytes:
            needed, free = format_bytes(least), format_bytes(free_bytes)
            raise ModelError(f"a text of {length:,} tokens takes at least {needed}, and only {free} are free.")
        if model.context is not None and length > model.context:
            raise ModelError(f"a text of {length:,} tokens is longer than the model's context of {model.context:,}.")
    for task in tasks:
        if isinstance(task, Passkey):
            if tokenizer is None:
                raise ModelError(f"the task {name_of(task)} needs a tokenizer, and the model has no tokenizer.json.")
        elif task.vocabulary > model.vocabulary:
            raise ModelError(
                f"{name_of(task)} has {task.vocabulary:,} symbols, and the model's vocabulary is {model.vocabulary:,}."
            )
        # Generates a sample now, which raises an error if a question does not fit into the shortest text.
        _sample(task, tokenizer, torch.Generator().manual_seed(0), 1, min(lengths), model.vocabulary)


def _at_once(model: Cached, length: int) -> int:
    most = min(_TOKENS // min(length, PIECE), _WAITING // length) if isinstance(model, Advancing) else _TOKENS // length
    return max(1, most)


def _sample(
    task: Recall, tokenizer: Any, generator: torch.Generator, batch: int, length: int, vocabulary: int
) -> Sample:
    if isinstance(task, Passkey):
        return tokenized_sample(task, tokenizer, generator, batch, length, vocabulary)
    return task.sample(generator, batch, length)


def _right(model: Cached, sample: Sample, device: torch.device, whole: bool) -> tuple[torch.Tensor, int]:
    """Returns whether each answer (a token; if `whole`, all of a text) is right, and the size of one text's state."""
    asked_BS = sample.targets_BS != IGNORED
    found, held = predict(model, sample.tokens_BS.to(device), asked_BS.to(device))
    if bool((found < 0).any()):
        warnings.warn("some logits of the model are not finite: those answers count as wrong.", stacklevel=2)
    right = found.cpu() == sample.targets_BS[asked_BS]
    if not whole:
        return right, held
    wrong_BS = torch.zeros_like(asked_BS)
    wrong_BS[asked_BS] = ~right
    return ~wrong_BS.any(1), held


@torch.no_grad()
def loss_by_position(
    model: Cached,
    tokens: Sequence[int],
    length: int,
    samples: int = 64,
    device: torch.device | str = "cpu",
    status: Status = lambda line: None,
) -> list[LossRow]:
    """Returns the mean loss by position in rows of `length` tokens of a text, in buckets that end at powers of two."""
    if len(tokens) < 2:
        raise ModelError("the text has fewer than 2 tokens: there is nothing to predict.")
    if max(tokens) >= model.vocabulary:
        raise ModelError(
            f"the text has token {max(tokens)}, which is outside the model's vocabulary of {model.vocabulary}."
        )
    length = min(length, len(tokens) - 1)
    rows = min(samples, (len(tokens) - 1) // length)
    text = torch.tensor(tokens[: rows * length + 1])
    totals = torch.zeros(length, dtype=torch.float64)
    most = _at_once(model, length)
    for first in range(0, rows, most):
        status(f"loss of {length:,} tokens: {first} of {rows}")
        part = text[first * length : min(first + most, rows) * length + 1].to(device)
        inputs, targets = part[:-1].view(-1, length), part[1:].view(-1, length)
        for begin, logits, _ in pieces(model, inputs):
            wanted = targets[:, begin : begin + logits.shape[1]]
            losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
            totals[begin : begin + wanted.shape[1]] += losses.view_as(wanted).double().sum(0).cpu()
    return list(_buckets(totals, rows))


def _buckets(totals_S: torch.Tensor, rows: int) -> list[LossRow]:
    found, low = [], 1
    while low <= len(totals_S):
        high = min(max(2 * (low - 1), _FIRST_BUCKET), len(totals_S))
        part = totals_S[low - 1 : high]
        found.append(LossRow(low, high, float(part.mean()) / rows, rows * len(part)))
        low = high + 1
    return found
