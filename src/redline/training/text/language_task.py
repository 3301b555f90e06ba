"""What training a language model is, whatever its batches are made of: the loss of the next token, part by part.

B: rows of a batch, S: tokens of a row.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.nn.packing import Packing
from redline.training.arithmetic import Arithmetic
from redline.training.determinism import deterministic
from redline.training.task import FREE_TO_CHANGE, Task
from redline.training.text.config import TextTraining
from redline.training.text.loss_module import LossModule, as_inputs
from redline.training.text.packing import Batch
from redline.training.text.trainee import make_trainee
from redline.training.working_copy import WorkingCopy


def identity_of_settings(training: TextTraining) -> dict[str, Any]:
    """The part of a training's identity that is known before its text is; what else follows from comes first."""
    free = {*FREE_TO_CHANGE, "plan", "rate_scaling", "rate_tokens", "sources", "shards", "batch", "accumulate"}
    free |= {"text_field", "separator", "validation_rows", "vocabulary", "precision", "deterministic"}
    parts = (training.model, training.data, training.loop)
    settings = {name: value for part in parts for name, value in asdict(part).items() if name not in free}
    return {"kind": training.kind, **settings}


class LanguageTask(Task):
    """`tokens` is how many there are to know; `_draw` makes the rows of a step, from the seed and the step alone."""

    unit = "token"
    # What padding would have wasted, where there are documents to pad.
    padding_share: float | None = None

    def __init__(self, training: TextTraining, tokens: int, device: torch.device) -> None:
        batch = training.data.batch
        assert isinstance(batch, int)
        self.training, self.device = training, device
        self.parts, self.items_per_step = training.data.accumulate, training.tokens_per_step
        self.vocabulary = training.model.vocabulary_for(tokens)
        self.trainee = make_trainee(training, self.vocabulary, device, (self._inputs(self._draw(0), 0, batch),))
        self.model: nn.Module = self.trainee.model
        self.precision = self.trainee.precision
        self.flops_per_item = training.model.flops_per_token(self.model, self.attended)
        self._ahead = ThreadPoolExecutor(1, "batches")
        self._drawn: tuple[int, Future[Batch]] | None = None
        self._step: tuple[int, Batch] | None = None

    @property
    def attended(self) -> float:
        """The mean length of what a token attends in."""
        return self.training.data.length

    @abstractmethod
    def _draw(self, step: int) -> Batch: ...

    @property
    @abstractmethod
    def data_identity(self) -> Mapping[str, Any]:
        """What it learns from, wherever that lies."""

    @abstractmethod
    def save(self, model: nn.Module, folder: Path) -> None:
        """The model's folder, with all that is needed to use it."""

    @property
    def arithmetic(self) -> Arithmetic:
        return self.trainee.arithmetic

    @property
    def identity(self) -> Mapping[str, Any]:
        """How fast it goes may change when it is resumed, and where its files lie; what it learns from what may not."""
        asked = {"vocabulary": self.vocabulary, "precision": self.trainee.precision}
        settings = identity_of_settings(self.training)
        return {**settings, **asked, **self.data_identity, "tokens_per_step": self.items_per_step}

    def optimizer(self) -> Optimizer:
        return self.trainee.optimizer()

    @contextmanager
    def around(self) -> Iterator[None]:
        with deterministic(self.training.loop.deterministic), self.trainee.around():
            yield

    def loss(self, step: int, part: int = 0) -> Tensor:
        """Each part weighs as many targets as it has, so that parts add up to the mean of the step."""
        batch, rows = self._batch(step), len(self._batch(step).tokens_BS) // self.parts
        inputs = self._inputs(batch, part * rows, rows)
        self.training.model.before_step(self.trainee.module.model, step)
        own = int((batch.targets_BS[part * rows : (part + 1) * rows] >= 0).sum()) if self.parts > 1 else 1
        share = own / max(1, batch.targets) if self.parts > 1 else 1.0
        return self.trainee.forward(inputs) * share

    def penalties(self, step: int) -> tuple[str, ...]:
        return (*(("z-loss",) if self.training.loop.z_loss else ()), *self.training.model.penalties(step))

    def _batch(self, step: int) -> Batch:
        """The rows of a step; those of the next are drawn meanwhile."""
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
    def _judged(self, model: nn.Module) -> Iterator[LossModule]:
        """Yields `model` in evaluation mode, computing as in training: under the settings of the plan, too.

        Compiled blocks recompile for evaluation. Outside of the plan's settings they would exceed dynamo's limit of
        recompilations, and those that come later would run uncompiled.
        """
        working = self.arithmetic
        if isinstance(working, WorkingCopy):
            working.show(model)
            module = self.trainee.module
        else:
            module = LossModule(self.training.model, model)
        module.eval()
        try:
            with self.trainee.around():
                yield module
        finally:
            if isinstance(working, WorkingCopy):
                module.train()
                working.publish()
