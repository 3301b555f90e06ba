"""Needles in text for models with a tokenizer: the same texts, cut to a number of tokens."""

from typing import Any

import torch

from redline.errors import ModelError
from redline.evaluation.recall.passkey import Passkey
from redline.evaluation.recall.task import IGNORED, Sample

# A first guess of the characters per token.
_CHARACTERS = 4


def tokenized_sample(
    task: Passkey, tokenizer: Any, generator: torch.Generator, batch: int, length: int, vocabulary: int
) -> Sample:
    """Returns `batch` rows of `length` tokens. Only the filler text is cut, never the needle or the question."""
    rows = [_one(task, tokenizer, generator, length) for _ in range(batch)]
    text = torch.tensor(rows)
    largest = int(text[:, :, 0].max())
    if largest >= vocabulary:
        raise ModelError(
            f"the tokenizer returns token {largest}, which is outside the model's vocabulary of {vocabulary}."
        )
    tokens_BS, is_answer_BS = text[:, :, 0], text[:, :, 1].bool()
    targets = torch.where(is_answer_BS[:, 1:], tokens_BS[:, 1:], IGNORED)
    return Sample(tokens_BS[:, :-1].contiguous(), targets)


def _one(task: Passkey, tokenizer: Any, generator: torch.Generator, length: int) -> list[tuple[int, bool]]:
    """Returns `length` + 1 tokens, each with whether it belongs to the answer. The last one is only a target."""
    story = task.story(generator)
    begin: list[int] = tokenizer.encode("").ids
    needle: list[int] = tokenizer.encode(story.needle, add_special_tokens=False).ids
    ending = tokenizer.encode(story.question + story.answer, add_special_tokens=False)
    # A token that spans the end of the question and the start of the answer counts as part of the answer.
    answers = [end > len(story.question) for _, end in ending.offsets]
    free = length + 1 - len(begin) - len(needle) - len(ending.ids)
    if free < 0:
        raise ModelError(f"a needle and its question need {length - free} tokens, not {length}: use longer texts.")
    filler = _filler(task, tokenizer, generator, free)
    place = int(torch.randint(free + 1, (), generator=generator))
    before = [*begin, *filler[:place], *needle, *filler[place:]]
    return [(token, False) for token in before] + list(zip(ending.ids, answers, strict=True))


def _filler(task: Passkey, tokenizer: Any, generator: torch.Generator, count: int) -> list[int]:
    characters = _CHARACTERS * count + 1
    while True:
        found: list[int] = tokenizer.encode(task.filler(generator, characters), add_special_tokens=False).ids
        if len(found) >= count:
            return found[:count]
        characters *= 2
