"""Finds the largest batch whose training step fits in memory, by running a few steps of each candidate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from redline.machine.quiet import quiet
from redline.training.ema import Ema
from redline.training.optimizers import step_unless
from redline.training.text.config import TextTraining
from redline.training.text.packing import synthetic_batch
from redline.training.text.trained_model import make_trained_model

# If an epoch has fewer steps than this, a larger batch makes steps slower without speeding up learning.
_MIN_STEPS_PER_EPOCH = 50
_LARGEST_BATCH = 4096


@dataclass(frozen=True)
class TrainingCase:
    """One training step with everything that the loop keeps in memory."""

    training: TextTraining
    vocabulary: int

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        where = torch.device(device)
        length = self.training.data.length
        # Suppresses warnings, because the training run that follows repeats them.
        with quiet():
            trained = make_trained_model(self.training.with_batch(batch), self.vocabulary, where)
        optimizer = trained.optimizer()
        ema = Ema(trained.model, self.training.loop.ema_decay) if self.training.loop.ema_decay else None
        inputs = synthetic_batch(batch, length, self.vocabulary, 0).inputs(where)

        # Two micro-batches reach the peak: from the second on, gradients are in memory during the forward pass.
        parts = min(self.training.data.accumulate, 2)

        def step() -> None:
            with trained.around():
                for _ in range(parts):
                    trained.arithmetic.backward(trained.forward(inputs))
            trained.arithmetic.unscale(optimizer)
            torch.nn.utils.clip_grad_norm_(trained.model.parameters(), self.training.loop.clip_norm)
            with quiet():
                step_unless(torch.zeros((), dtype=torch.bool, device=where), optimizer)
            optimizer.zero_grad(set_to_none=True)
            trained.arithmetic.publish()
            if ema:
                ema.update(1)

        return step, parts * batch * length, "token"


def batch_limit(training: TextTraining, rows: int | None) -> tuple[int, str]:
    """Returns the largest batch to try for a text of `rows` rows, and the reason for this limit."""
    share = _LARGEST_BATCH if rows is None else max(rows // (_MIN_STEPS_PER_EPOCH * training.data.accumulate), 1)
    if share < _LARGEST_BATCH:
        return share, f"with a larger batch an epoch would have fewer than {_MIN_STEPS_PER_EPOCH} steps"
    return _LARGEST_BATCH, "the largest batch that is tried"
