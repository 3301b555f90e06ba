"""A training config as a workload for the ladder: `redline climb train:CONFIG.toml` or `train:decoder-tiny`.

One step is a forward pass, a backward pass and an optimizer step, as in training, but in fp32 and without a plan: the
climb searches for precision and plan. Half-precision weights are copies of fp32 masters, as in training. Batches are
synthetic and packed like real ones. With gradient accumulation, a step processes only one micro-batch. Averaged weights
(EMA) are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.machine.meta import meta_device
from redline.training.bundled import find_config
from redline.training.optimizers import build_over, hidden_matrices
from redline.training.text.architecture import LossModule, own_loss
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.packing import synthetic_batch

# The batch size of a climb if the config says "auto".
_BATCH = 8


def training_workload(config: str) -> Callable[..., Workload]:
    """Returns the workload function of an address `train:CONFIG`: a config file, or the name of a bundled one."""
    path, _ = find_config(config, "text")

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
        return synthetic_batch(rows, length, vocabulary, seed).inputs(torch.get_default_device())

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        weights = list(parameters)
        # The same model on the meta device shows which of the given weights are hidden matrices.
        with meta_device():
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
