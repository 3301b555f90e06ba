"""A settings file as a workload, so that the ladder climbs this very training: `redline climb train:CONFIG.toml`.

Bundled settings go by their name: `redline climb train:decoder-tiny`.

One step is a forward pass, a backward pass and the optimizer on the best implementation there is, as in training, but
in fp32 and without any plan: what the file says of precision and plan is what a climb is to find out. Half-precision
weights follow fp32 ones, as in training. No text is needed; batches are synthetic, packed as real ones are. Where the
file accumulates, a step is one of the parts with the optimizer; averaged weights (EMA) are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.training.bundled import find_settings
from redline.training.optimizers import build_over, hidden_matrices
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.loss_module import LossModule, as_inputs, own_loss
from redline.training.text.synthetic import synthetic_batch

# Where the file leaves the batch to be found, a climb takes one that fits nearly everywhere.
_BATCH = 8


def training_workload(settings: str) -> Callable[..., Workload]:
    """The function that an address `train:SETTINGS` stands for: a file, or the name of bundled ones."""
    path = find_settings(settings, "text")

    def training(batch: int | None = None, length: int | None = None) -> Workload:
        return make_workload(TextTraining.read(path, batch=batch, length=length))

    training.__name__ = training.__qualname__ = path.stem
    return training


def make_workload(training: TextTraining) -> Workload:
    if training.data.batch == AUTO:
        training = training.with_batch(_BATCH)
    rows, length = training.data.batch, training.data.length
    assert isinstance(rows, int)
    tokenizer = training.tokenizer
    tokens = tokenizer.load().vocabulary if tokenizer.file else tokenizer.vocabulary
    vocabulary = training.model.vocabulary_for(tokens)
    loop = replace(training.loop, learning_rate=training.loop.rate_for(training.tokens_per_step))

    def build() -> nn.Module:
        return LossModule(training.model, training.model.build(vocabulary), loop.z_loss)

    def inputs(seed: int) -> dict[str, Tensor]:
        made = synthetic_batch(rows, length, vocabulary, seed)
        return as_inputs(made.tokens_BS, made.targets_BS, made.packing, torch.get_default_device())

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        weights = list(parameters)
        # A model of no size at all, whose matrices stand in the same places.
        with torch.device("meta"):
            alike = build()
        hidden = {id(weight) for weight in hidden_matrices(alike)}
        pairs = zip(weights, alike.parameters(), strict=True)
        return build_over(weights, [weight for weight, twin in pairs if id(twin) in hidden], loop)

    return Workload(
        build=build,
        inputs=inputs,
        loss=own_loss,
        optimizer=optimizer,
        gates=(Gate("loss_difference", 0.01), Gate("gradient_difference", 0.05)),
        items=rows * length,
        unit="token",
        master_weights=True,
    )
