"""Trains a language model on a recall task, with new samples in every step.

The samples depend on the seed and the step alone, so a resumed run sees the same ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from redline.evaluation.recall.passkey import Passkey
from redline.evaluation.recall.task import IGNORED, Sample
from redline.evaluation.recall.tasks import KEY, describe
from redline.files.atomic import write_text
from redline.nn.packing import Packing
from redline.training.text.config import TextTraining
from redline.training.text.packing import NO_TARGET, Batch
from redline.training.text.task import LanguageTask
from redline.training.text.tokenizer import NAME, byte_tokenizer

assert IGNORED == NO_TARGET
_TRAINING, _VALIDATION = 0, 1
# Tokens per validation batch.
_VALIDATION_TOKENS = 2**15


class RecallTask(LanguageTask):
    """Trains on a recall task. Validation measures the fraction of queried tokens that the model predicts correctly."""

    def __init__(self, training: TextTraining, device: torch.device) -> None:
        assert training.recall is not None
        self.recall = training.recall
        super().__init__(training, self.recall.vocabulary, device)

    @property
    def data_identity(self) -> Mapping[str, Any]:
        return {KEY: describe(self.recall)}

    def save(self, model: nn.Module, folder: Path) -> None:
        if isinstance(self.recall, Passkey):
            # The task's tokens are bytes; with this tokenizer, the model can be prompted with any text.
            write_text(folder / NAME, byte_tokenizer())
        self.training.model.save(model, folder, None, {KEY: describe(self.recall)})

    def _draw(self, step: int) -> Batch:
        length = self.training.data.length
        sample = self._sample(_TRAINING, step, self.items_per_step // length, length)
        documents = torch.zeros(sample.tokens_BS.shape, dtype=torch.int32)
        return Batch(sample.tokens_BS, sample.targets_BS, Packing.of(documents))

    def _sample(self, purpose: int, step: int, rows: int, length: int) -> Sample:
        numbers = np.random.SeedSequence((self.training.loop.seed, purpose, step)).generate_state(1, np.uint64)
        return self.recall.sample(torch.Generator().manual_seed(int(numbers[0])), rows, length)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        """Returns the recall on samples that are the same each time and never used for training."""
        rows, length = self.training.data.validation_rows, self.training.data.length
        at_once, right, asked = max(1, _VALIDATION_TOKENS // length), 0, 0
        with self._evaluating(model) as module:
            for first in range(0, rows, at_once):
                sample = self._sample(_VALIDATION, first, min(at_once, rows - first), length).to(self.device)
                wanted = sample.targets_BS != IGNORED
                found = module.model(sample.tokens_BS)[wanted].argmax(-1)
                right += int((found == sample.targets_BS[wanted]).sum())
                asked += len(found)
        return {"recall": right / asked}
