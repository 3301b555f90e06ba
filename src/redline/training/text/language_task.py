"""The next-token loss of a language model, part by part; subclasses make the batches.

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

from redline.nn.packing import Packing
from redline.training.arithmetic import Arithmetic, WorkingCopy
from redline.training.determinism import deterministic
from redline.training.task import Task, settings_except
from redline.training.text.config import TextTraining
from redline.training.text.loss_module import LossModule, as_inputs
from redline.training.text.packing import Batch
from redline.training.text.trained_model import make_trained_model


def identity_of_settings(training: TextTraining) -> dict[str, Any]:
    """Returns the part of a training's identity that does not depend on its text, most decisive settings first."""
    free = {"plan", "rate_scaling", "rate_tokens", "sources", "shards", "batch", "accumulate", "text_field"}
    free |= {"separator", "validation_rows", "vocabulary", "precision", "deterministic"}
    return {"kind": training.kind, **settings_except(free, training.model, training.data, training.loop)}


class LanguageTask(Task):
    """`tokens` is the size of the tokenizer's vocabulary. `_draw` makes the rows of a step from seed and step alone."""

    unit = "token"
    # The share of tokens that padding would have wasted; None without documents.
    padding_share: float | None = None

    def __init__(self, training: TextTraining, tokens: int, device: torch.device) -> None:
        batch = training.data.batch
        assert isinstance(batch, int)
        self.training, self.device = training, device
        self.parts, self.items_per_step = training.data.accumulate, training.tokens_per_step
        self.vocabulary = training.model.vocabulary_for(tokens)
        self.trained = make_trained_model(training, self.vocabulary, device, (self._inputs(self._draw(0), 0, batch),))
        self.model: nn.Module = self.trained.model
        self.precision = self.trained.precision
        self.flops_per_item = training.model.flops_per_token(self.model, self.attended)
        self._ahead = ThreadPoolExecutor(1, "batches")
        self._drawn: tuple[int, Future[Batch]] | None = None
        self._step: tuple[int, Batch] | None = None

    @property
    def attended(self) -> float:
        """The mean length of the context that a token attends in."""
        return self.training.data.length

    @abstractmethod
    def _draw(self, step: int) -> Batch: ...

    @property
    @abstractmethod
    def data_identity(self) -> Mapping[str, Any]:
        """Identifies the training data, independent of its location."""

    @abstractmethod
    def save(self, model: nn.Module, folder: Path) -> None:
        """Writes a model folder with everything needed to generate text."""

    @property
    def arithmetic(self) -> Arithmetic:
        return self.trained.arithmetic

    @property
    def identity(self) -> Mapping[str, Any]:
        """Speed settings and file locations may change on resume; model, data and batch may not."""
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
        batch, rows = self._batch(step), len(self._batch(step).tokens_BS) // self.parts
        inputs = self._inputs(batch, part * rows, rows)
        self.training.model.before_step(self.trained.module.model, step)
        own = int((batch.targets_BS[part * rows : (part + 1) * rows] >= 0).sum()) if self.parts > 1 else 1
        share = own / max(1, batch.targets) if self.parts > 1 else 1.0
        return self.trained.forward(inputs) * share

    def penalties(self, step: int) -> tuple[str, ...]:
        return (*(("z-loss",) if self.training.loop.z_loss else ()), *self.training.model.penalties(step))

    def _batch(self, step: int) -> Batch:
        """Returns the rows of a step, and starts drawing the rows of the next step in a background thread."""
        if self._step is None or self._step[0] != step:
            drawn = self._drawn[1].result() if self._drawn and self._drawn[0] == step else self._draw(step)
            self._step = (step, drawn)
            self._drawn = (step + 1, self._ahead.submit(self._draw, step + 1))
        return self._step[1]

    def _inputs(self, batch: Batch, first: int, rows: int) -> dict[str, Tensor]:
        chosen = slice(first, first + rows)
        whole = rows == len(batch.tokens_BS)
        packing = batch.packing if whole else Packing.of(batch.packing.documents_BS[chosen])
        return as_inputs(batch.tokens_BS[chosen], batch.targets_BS[chosen], packing, self.device)

    @contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[LossModule]:
        """Yields `model` in evaluation mode, with the precision of training and inside the plan's contexts.

        Compiled blocks recompile for evaluation. Outside of the plan's contexts they would exceed dynamo's limit of
        recompilations, and later blocks would run uncompiled.
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
