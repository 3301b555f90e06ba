"""Trains a language model to predict the next token. A step processes its batch in parts; text comes in packed rows.

B: rows of a batch, S: tokens of a row.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.files.atomic import write_text
from redline.training.arithmetic import Arithmetic, WorkingCopy
from redline.training.determinism import deterministic
from redline.training.task import Task, settings_except
from redline.training.text.architecture import LossModule
from redline.training.text.config import TextTraining
from redline.training.text.corpus import Corpus
from redline.training.text.packing import Batch, PackedRows, padding_share
from redline.training.text.tokenizer import CONFIG_NAME, NAME
from redline.training.text.trained_model import make_trained_model

# Rows per validation batch.
_VALIDATION_BATCH = 8


def identity_of_settings(training: TextTraining) -> dict[str, Any]:
    """Returns the settings that identify a training run, without its text; the most important settings come first."""
    free = {"plan", "rate_scaling", "rate_tokens", "sources", "shards", "batch", "accumulate", "text_field"}
    free |= {"separator", "validation_rows", "vocabulary", "precision", "deterministic"}
    free |= {"conversations", "workers"}
    return {"kind": training.kind, **settings_except(free, training.model, training.data, training.loop)}


class LanguageTask(Task):
    """Trains on tokens. `tokens` is the size of the tokenizer's vocabulary; `_draw` depends on seed and step alone."""

    unit = "token"
    # The share of tokens that padding would have wasted; None without documents.
    padding_share: float | None = None

    def __init__(self, training: TextTraining, tokens: int, device: torch.device) -> None:
        batch = training.data.batch
        assert isinstance(batch, int)
        self.training, self.device = training, device
        self.parts, self.items_per_step = training.data.accumulate, training.tokens_per_step
        self.vocabulary = training.model.vocabulary_for(tokens)
        samples = (self._draw(0).part(0, batch).inputs(device),)
        self.trained = make_trained_model(training, self.vocabulary, device, samples)
        self.model: nn.Module = self.trained.model
        self.precision = self.trained.precision
        self.flops_per_item = training.model.flops_per_token(self.model, self.attended)
        self._ahead = ThreadPoolExecutor(1, "batches")
        self._drawn: tuple[int, Future[Batch]] | None = None
        self._step: tuple[int, Batch] | None = None

    @property
    def attended(self) -> float:
        """The mean length of a token's row, or of its document if rows are packed."""
        return self.training.data.length

    @abstractmethod
    def _draw(self, step: int) -> Batch: ...

    @property
    @abstractmethod
    def data_identity(self) -> Mapping[str, Any]:
        """Returns an identity of the training data that does not depend on its location."""

    @abstractmethod
    def save(self, model: nn.Module, folder: Path) -> None:
        """Writes a model folder with everything needed to generate text."""

    def close(self) -> None:
        """Ends what prepares batches; called after the last step."""
        self._ahead.shutdown()

    @property
    def arithmetic(self) -> Arithmetic:
        return self.trained.arithmetic

    @property
    def identity(self) -> Mapping[str, Any]:
        """The settings that must not change on resume: model, data and batch; speed and file locations may change."""
        asked = {"vocabulary": self.vocabulary, "precision": self.trained.precision}
        settings = identity_of_settings(self.training)
        return {**settings, **asked, **self.data_identity, "tokens_per_step": self.items_per_step}

    def optimizer(self) -> Optimizer:
        return self.trained.optimizer()

    @contextmanager
    def around(self) -> Iterator[None]:
        with deterministic(self.training.loop.deterministic), self.trained.around():
            yield

    def loss(self, step: int, part: int = 0) -> Tensor:
        """Returns the loss of a part, weighted by its number of targets, so that parts add up to the step's mean."""
        batch = self._batch(step)
        rows = len(batch.tokens_BS) // self.parts
        chosen = batch.part(part * rows, rows)
        self.training.model.before_step(self.trained.module.model, step)
        share = chosen.targets / max(1, batch.targets) if self.parts > 1 else 1.0
        return self.trained.forward(chosen.inputs(self.device)) * share

    def penalties(self, step: int) -> tuple[str, ...]:
        return (*(("z-loss",) if self.training.loop.z_loss else ()), *self.training.model.penalties(step))

    def _batch(self, step: int) -> Batch:
        """Returns the rows of a step, and starts preparing those of the next step in a background thread."""
        if self._step is None or self._step[0] != step:
            drawn = self._drawn[1].result() if self._drawn and self._drawn[0] == step else self._draw(step)
            self._step = (step, drawn)
            self._drawn = (step + 1, self._ahead.submit(self._draw, step + 1))
        return self._step[1]

    @contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[LossModule]:
        """Yields `model` in evaluation mode, in the training precision and inside the plan's contexts.

        Compiled blocks recompile for evaluation. The plan's contexts raise dynamo's limit of recompilations; without
        them, blocks beyond the limit would run uncompiled.
        """
        working = self.arithmetic
        if isinstance(working, WorkingCopy):
            working.show(model)
            module = self.trained.module
        else:
            module = LossModule(self.training.model, model)
        module.eval()
        try:
            with self.trained.around():
                yield module
        finally:
            if isinstance(working, WorkingCopy):
                module.train()
                working.publish()


def rows_of(training: TextTraining, corpus: Corpus) -> tuple[PackedRows, PackedRows | None]:
    """Returns the rows for training and the rows held out for validation, if any."""
    data, corpus = training.data, corpus.with_an_end(training.data.validation)
    chosen, held_out = corpus.split(data.validation)
    rows = PackedRows(corpus.shards, chosen, data.length, training.loop.seed)
    # A small corpus holds out few tokens, so validation rows may be shorter.
    short = min(data.length, int(corpus.lengths[held_out].sum()))
    return rows, PackedRows(corpus.shards, held_out, short, 0) if len(held_out) else None


class TextTask(LanguageTask):
    """Trains a language model on a corpus."""

    def __init__(self, training: TextTraining, corpus: Corpus, device: torch.device) -> None:
        data, batch = training.data, training.data.batch
        assert isinstance(batch, int)
        self.corpus = corpus
        self.rows, self.held_out = rows_of(training, corpus)
        self.padding_share: float | None = padding_share(self.rows.lengths, data.length, batch)
        super().__init__(training, corpus.tokenizer.vocabulary, device)

    @property
    def attended(self) -> float:
        return self.rows.attended

    @property
    def data_identity(self) -> Mapping[str, Any]:
        return self.corpus.identity

    def save(self, model: nn.Module, folder: Path) -> None:
        self.training.model.save(model, folder, self.corpus.tokenizer.end)
        write_text(folder / NAME, self.corpus.tokenizer.to_text())
        write_text(folder / CONFIG_NAME, self.corpus.tokenizer.config_text())

    def _draw(self, step: int) -> Batch:
        rows = self.items_per_step // self.training.data.length
        return self.rows.batch(step * rows, rows)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        """Returns the mean loss over held-out rows, computed in the training precision."""
        if self.held_out is None:
            return {}
        rows = min(self.training.data.validation_rows, self.held_out.rows)
        total, count = torch.zeros((), device=self.device), 0
        with self._evaluating(model) as module:
            for first in range(0, rows, _VALIDATION_BATCH):
                batch = self.held_out.batch(first, min(_VALIDATION_BATCH, rows - first))
                loss = module(**batch.inputs(self.device))
                total += loss.float() * batch.targets
                count += batch.targets
        return {"validation_loss": float(total) / max(count, 1)}
