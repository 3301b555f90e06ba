"""Trains a language model on text in packed rows, and validates it on held-out documents."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.files.atomic import write_text
from redline.training.text.config import TextTraining
from redline.training.text.corpus import Corpus
from redline.training.text.language_task import LanguageTask
from redline.training.text.packing import Batch, PackedRows, padding_share
from redline.training.text.tokenizer import CONFIG_NAME, NAME

# Rows per validation batch.
_VALIDATION_BATCH = 8


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
        """Returns the mean loss over held-out rows, computed in the precision of training."""
        if self.held_out is None:
            return {}
        rows = min(self.training.data.validation_rows, self.held_out.rows)
        total, count = torch.zeros((), device=self.device), 0
        with self._evaluating(model) as module:
            for first in range(0, rows, _VALIDATION_BATCH):
                batch = self.held_out.batch(first, min(_VALIDATION_BATCH, rows - first))
                loss = module(**self._inputs(batch, 0, len(batch.tokens_BS)))
                total += loss.float() * batch.targets
                count += batch.targets
        return {"validation_loss": float(total) / max(count, 1)}
