"""The largest batch whose training step fits in memory, found by really training a few steps of each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from redline.ladder.batch_size import BatchSizeResult, Probe, search
from redline.quiet import quiet
from redline.training.ema import Ema
from redline.training.optimizers import step_unless
from redline.training.text.config import TextTraining
from redline.training.text.loss_module import as_inputs
from redline.training.text.synthetic import synthetic_batch
from redline.training.text.trainee import make_trainee

# A step on much of the text learns little more than one on less, and takes as much longer.
_STEPS_AN_EPOCH = 50
_MOST = 4096


@dataclass(frozen=True)
class TrainingCase:
    """One step as the loop makes it, with all that the loop holds in memory."""

    training: TextTraining
    vocabulary: int

    def open(self, batch: int, device: str) -> tuple[Callable[[], object], float, str]:
        where = torch.device(device)
        length = self.training.data.length
        # What there is to say of this machine, the training that follows says once.
        with quiet():
            trainee = make_trainee(self.training.with_batch(batch), self.vocabulary, where)
        optimizer = trainee.optimizer()
        ema = Ema(trainee.model, self.training.loop.ema_decay) if self.training.loop.ema_decay else None
        made = synthetic_batch(batch, length, self.vocabulary, 0)
        inputs = as_inputs(made.tokens_BS, made.targets_BS, made.packing, where)

        # From the second part on a step holds gradients while it goes forward.
        parts = min(self.training.data.accumulate, 2)

        def step() -> None:
            with trainee.around():
                for _ in range(parts):
                    trainee.arithmetic.backward(trainee.forward(inputs))
            trainee.arithmetic.unscale(optimizer)
            torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), self.training.loop.clip_norm)
            with quiet():
                step_unless(torch.zeros((), dtype=torch.bool, device=where), optimizer)
            optimizer.zero_grad(set_to_none=True)
            trainee.arithmetic.publish()
            if ema:
                ema.update(trainee.model, 1)

        return step, parts * batch * length, "token"


def largest_tried(training: TextTraining, rows: int | None) -> tuple[int, str]:
    """The most rows of a batch, and why no more: a text with `rows` of them should last for some steps."""
    share = _MOST if rows is None else max(rows // (_STEPS_AN_EPOCH * training.data.accumulate), 1)
    if share < _MOST:
        return share, f"with a larger one the text would be through in fewer than {_STEPS_AN_EPOCH} steps"
    return _MOST, "no larger one is tried"


def find_batch(
    training: TextTraining,
    vocabulary: int,
    device: torch.device,
    tell: Callable[[Probe], None] = lambda probe: None,
    most: int = _MOST,
) -> BatchSizeResult:
    return search(TrainingCase(training, vocabulary), max_batch=most, device=str(device), on_probe=tell)
