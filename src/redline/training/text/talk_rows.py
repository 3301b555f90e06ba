"""Rows of conversations written by code: each row is a pure function of the seed and its number.

Conversations are concatenated until the row is full; the last one is cut. Worker processes write rows ahead of the
training. This module does not import torch, because every worker process imports it.

R: rows, S: tokens of a row.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from redline.datasets.conversations import Draw, conversation
from redline.training.text.assistant_tokens import assistant_tokens
from redline.training.text.chat_format import SPECIAL_TOKENS, render
from redline.training.text.tokenizer import TextTokenizer, parse_tokenizer, train_tokenizer

# The tokenizer is trained on this many conversations per token of its vocabulary.
_TOKENIZER_SHARE = 10
# The number of rows per task of a worker process, and the number of batches that are written ahead of the training.
_ROWS_PER_TASK, _BATCHES_AHEAD = 8, 4


@dataclass(frozen=True)
class TalkRows:
    """Rows that are one token longer than the model's input, because the target of a position is the token after it.

    `answers_RS` says which tokens the assistant wrote; `documents_RS` numbers the conversation of each token.
    """

    tokens_RS: np.ndarray
    answers_RS: np.ndarray
    documents_RS: np.ndarray


def texts_for_tokenizer(vocabulary: int) -> Iterator[str]:
    for number in range(_TOKENIZER_SHARE * vocabulary):
        for message in conversation(Draw(0, "tokenizer", number)):
            yield message["content"]


def train_talk_tokenizer(vocabulary: int, split_digits: bool) -> TextTokenizer:
    """Trains a tokenizer on conversations, with the special tokens of the chat format."""
    texts = texts_for_tokenizer(vocabulary)
    return train_tokenizer(texts, vocabulary, special_tokens=True, names=SPECIAL_TOKENS, split_digits=split_digits)


def write_rows(tokenizer: TextTokenizer, seed: int, first: int, rows: int, length: int) -> TalkRows:
    """Writes `rows` rows of `length` + 1 tokens, starting with row number `first`."""
    tokens_RS = np.empty((rows, length + 1), dtype=np.uint32)
    answers_RS = np.empty((rows, length + 1), dtype=bool)
    documents_RS = np.empty((rows, length + 1), dtype=np.int32)
    for row in range(rows):
        draw, filled, document = Draw(seed, "training", first + row), 0, 0
        while filled <= length:
            written = render(conversation(draw))
            encoded = tokenizer.inner.encode(written.text, add_special_tokens=False)
            answers = assistant_tokens(encoded.offsets, written.spans)
            end = min(filled + len(answers), length + 1)
            tokens_RS[row, filled:end] = encoded.ids[: end - filled]
            answers_RS[row, filled:end] = answers[: end - filled]
            documents_RS[row, filled:end] = document
            filled, document = end, document + 1
    return TalkRows(tokens_RS, answers_RS, documents_RS)


class RowWriter:
    """Returns the rows of each batch; if `workers` is not 0, worker processes write the next batches in advance."""

    def __init__(self, tokenizer: TextTokenizer, seed: int, length: int, workers: int = 0) -> None:
        self._tokenizer, self._seed, self._length = tokenizer, seed, length
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            context = multiprocessing.get_context("spawn")
            arguments = (tokenizer.inner.to_str(), tokenizer.end, seed, length)
            self._pool = ProcessPoolExecutor(workers, context, _start_worker, arguments)
        self._written: dict[tuple[int, int], Future[TalkRows]] = {}

    def rows(self, first: int, count: int) -> TalkRows:
        if self._pool is None:
            return write_rows(self._tokenizer, self._seed, first, count, self._length)
        last = first + count
        for begin in range(first, last + _BATCHES_AHEAD * count, count):
            for task in _tasks(begin, count):
                if task not in self._written:
                    self._written[task] = self._pool.submit(_work, *task)
        parts = [self._written.pop(task).result() for task in _tasks(first, count)]
        for task in [task for task in self._written if task[0] < last]:
            self._written.pop(task).cancel()
        return TalkRows(*(np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _tasks(first: int, count: int) -> list[tuple[int, int]]:
    return [(row, min(_ROWS_PER_TASK, first + count - row)) for row in range(first, first + count, _ROWS_PER_TASK)]


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: str, end: int, seed: int, length: int) -> None:
    # Ctrl-C reaches the whole process group; only the training process reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker.update(tokenizer=parse_tokenizer(tokenizer, end), seed=seed, length=length)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Ends the worker when the training process ends, because a killed process cannot shut its workers down."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(first: int, rows: int) -> TalkRows:
    return write_rows(_worker["tokenizer"], _worker["seed"], first, rows, _worker["length"])
