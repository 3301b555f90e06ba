"""Needles in text for models with a tokenizer of their own: the same stories, cut to a number of tokens."""

from typing import Any

import torch

from redline.errors import ModelError
from redline.evaluation.recall.passkey import Passkey
from redline.evaluation.recall.task import IGNORED, Sample

# Characters that a token of plain English has at first guess.
_CHARACTERS = 4


def tokenized_sample(
    task: Passkey, tokenizer: Any, generator: torch.Generator, batch: int, length: int, vocabulary: int
) -> Sample:
    """`batch` rows of `length` tokens; hay is cut between tokens, needle and question never."""
    rows = [_one(task, tokenizer, generator, length) for _ in range(batch)]
    text = torch.tensor(rows)
    largest = int(text[:, :, 0].max())
    if largest >= vocabulary:
        raise ModelError(f"the tokenizer gives the token {largest}, and the model's vocabulary is {vocabulary}.")
    tokens_BS, is_answer_BS = text[:, :, 0], text[:, :, 1].bool()
    targets = torch.where(is_answer_BS[:, 1:], tokens_BS[:, 1:], IGNORED)
    return Sample(tokens_BS[:, :-1].contiguous(), targets)


def _one(task: Passkey, tokenizer: Any, generator: torch.Generator, length: int) -> list[tuple[int, bool]]:
    """Every token, and whether it is of the answer; one more than `length`, which is a target alone."""
    story = task.story(generator)
    begin: list[int] = tokenizer.encode("").ids
    needle: list[int] = tokenizer.encode(story.needle, add_special_tokens=False).ids
    ending = tokenizer.encode(story.question + story.answer, add_special_tokens=False)
    # A token that holds the end of the question and the beginning of the answer is asked for.
    answers = [end > len(story.question) for _, end in ending.offsets]
    room = length + 1 - len(begin) - len(needle) - len(ending.ids)
    if room < 0:
        raise ModelError(f"a needle and its question need {length - room} tokens, not {length}.")
    hay = _hay(task, tokenizer, generator, room)
    place = int(torch.randint(room + 1, (), generator=generator))
    told = [*begin, *hay[:place], *needle, *hay[place:]]
    return [(token, False) for token in told] + list(zip(ending.ids, answers, strict=True))


def _hay(task: Passkey, tokenizer: Any, generator: torch.Generator, room: int) -> list[int]:
    characters = _CHARACTERS * room + 1
    while True:
        found: list[int] = tokenizer.encode(task.hay(generator, characters), add_special_tokens=False).ids
        if len(found) >= room:
            return found[:room]
        characters *= 2
