"""Trains a language model on conversations that Redline writes, with the loss on the assistant's tokens only.

A row depends on the seed and its number alone, so a resumed run sees the same conversations.

B: rows of a batch, S: tokens of a row.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redline.datasets.conversations import ASKED, Draw, conversation, question
from redline.files.atomic import write_text
from redline.nn.packing import Packing
from redline.training.text.assistant_tokens import assistant_tokens
from redline.training.text.chat_format import TEMPLATE, render
from redline.training.text.config import TextTraining
from redline.training.text.corpus import TokenizerSettings
from redline.training.text.packing import NO_TARGET, Batch
from redline.training.text.talk_rows import RowWriter, TalkRows, train_talk_tokenizer
from redline.training.text.task import LanguageTask
from redline.training.text.tokenizer import CONFIG_NAME, NAME, TextTokenizer, load_tokenizer

_VALIDATION_BATCH = 8
# The number of conversations whose digest identifies the code that writes them.
_IDENTIFYING = 256


def talk_tokenizer(settings: TokenizerSettings, out: Path) -> TextTokenizer:
    """Returns the tokenizer of a training run.

    It is read from the configured file, or else from the folder of the run. If that folder has none, it is trained and
    stored there.
    """
    if settings.file:
        return load_tokenizer(settings.file, settings.end, special_tokens=True)
    path = out / NAME
    if not path.exists():
        write_text(path, train_talk_tokenizer(settings.vocabulary, settings.split_digits).to_text())
    return load_tokenizer(path, special_tokens=True)


def identity_of_talk(tokenizer: TextTokenizer) -> dict[str, Any]:
    """Returns the identity of the data, which differs if another version of Redline writes other conversations."""
    first = [conversation(Draw(0, "identity", number)) for number in range(_IDENTIFYING)]
    digest = hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]
    return {"text": f"conversations ({digest})", "tokenizer": tokenizer.digest}


def talk_batch(rows: TalkRows) -> Batch:
    """Returns a batch whose targets are the assistant's tokens; all other positions have no target."""
    tokens_RS, documents_RS = rows.tokens_RS.astype(np.int64), rows.documents_RS
    wanted = rows.answers_RS[:, 1:] & (documents_RS[:, 1:] == documents_RS[:, :-1])
    targets = np.where(wanted, tokens_RS[:, 1:], NO_TARGET)
    tokens, targets_BS, documents = map(
        torch.from_numpy, (tokens_RS[:, :-1].copy(), targets, documents_RS[:, :-1].copy())
    )
    return Batch(tokens, targets_BS, Packing.of(documents))


class TalkTask(LanguageTask):
    """Trains on conversations. Validation measures for how many held-out questions every answer token is predicted."""

    def __init__(self, training: TextTraining, tokenizer: TextTokenizer, device: torch.device) -> None:
        self.tokenizer = tokenizer
        data = training.data
        self._writer = RowWriter(tokenizer, training.loop.seed, data.length, data.workers)
        try:
            super().__init__(training, tokenizer.vocabulary, device)
        except BaseException:
            self._writer.close()
            raise

    @property
    def data_identity(self) -> Mapping[str, Any]:
        return identity_of_talk(self.tokenizer)

    @property
    def attended(self) -> float:
        batch = self._draw(0)
        return float(batch.packing.positions_BS.float().mean() * 2)

    def save(self, model: nn.Module, folder: Path) -> None:
        self.training.model.save(model, folder, self.tokenizer.end)
        write_text(folder / NAME, self.tokenizer.to_text())
        write_text(folder / CONFIG_NAME, self.tokenizer.config_text(TEMPLATE))

    def close(self) -> None:
        super().close()
        self._writer.close()

    def _draw(self, step: int) -> Batch:
        rows = self.items_per_step // self.training.data.length
        return talk_batch(self._writer.rows(step * rows, rows))

    @torch.no_grad()
    def validate(self, model: nn.Module) -> dict[str, float]:
        """Returns the loss per token of held-out answers, and the share of answers whose every token is predicted.

        Greedy decoding gives the right answer exactly if every token of it is predicted.
        """
        examples = self._examples
        if not examples:
            return {}
        # All batches are padded to one length, so that a compiled model sees only one shape.
        length = max(len(tokens) for tokens, _ in examples)
        loss, tokens, right = 0.0, 0, 0
        with self._evaluating(model) as module:
            for first in range(0, len(examples), _VALIDATION_BATCH):
                chosen = examples[first : first + _VALIDATION_BATCH]
                tokens_BS, targets_BS = _padded(chosen, length, self.device)
                wanted = targets_BS != NO_TARGET
                logits = module.model(tokens_BS).float()
                loss += float(nn.functional.cross_entropy(logits[wanted], targets_BS[wanted], reduction="sum"))
                tokens += int(wanted.sum())
                right += int(((logits.argmax(-1) == targets_BS) | ~wanted).all(1).sum())
        return {"validation_loss": loss / tokens, "right": right / len(examples)}

    @cached_property
    def _examples(self) -> list[tuple[list[int], list[int]]]:
        found = map(self._example, range(self.training.data.validation_rows))
        return [example for example in found if example is not None]

    def _example(self, number: int) -> tuple[list[int], list[int]] | None:
        """Returns the tokens and targets of a held-out question; None if it is longer than a row."""
        asked = question(ASKED[number % len(ASKED)], number)
        written = render([*asked.messages, {"role": "assistant", "content": asked.answer}])
        encoded = self.tokenizer.inner.encode(written.text, add_special_tokens=False)
        if len(encoded.ids) > self.training.data.length + 1:
            return None
        answers = assistant_tokens(encoded.offsets, written.spans[-1:])
        return encoded.ids[:-1], np.where(answers[1:], encoded.ids[1:], NO_TARGET).tolist()


def _padded(examples: list[tuple[list[int], list[int]]], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns tokens and targets, padded at the end, where causal attention ignores the padding."""
    tokens = [tokens + [0] * (length - len(tokens)) for tokens, _ in examples]
    targets = [targets + [NO_TARGET] * (length - len(targets)) for _, targets in examples]
    return torch.tensor(tokens, device=device), torch.tensor(targets, device=device)
