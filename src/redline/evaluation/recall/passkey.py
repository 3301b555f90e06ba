"""Needles in text, based on the published S-NIAH tasks: the model must repeat a passkey, a number or a word.

The text is bytes, so the task does not depend on a tokenizer. `passkey` hides a number among repetitions of the same
sentences; `number` hides it among random words; `word` hides a random word among random words.

`tokenized_sample` makes such texts for a model with a tokenizer, with a given number of tokens.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from redline.errors import ModelError
from redline.evaluation.recall.task import IGNORED, Sample
from redline.files.limits import PositiveInt

KINDS = ("passkey", "number", "word")
_REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_CONSONANTS, _VOWELS = "bcdfglmnprstvz", "aeiou"
# The first guess of the characters per token.
_CHARACTERS = 4
_DIGITS, _LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Story:
    """The hidden sentence, the question at the end, and the expected answer."""

    needle: str
    question: str
    answer: str


@dataclass(frozen=True)
class Passkey:
    kind: str = "passkey"
    answer_bytes: PositiveInt = 7

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"unknown needle {self.kind!r}: use one of {', '.join(KINDS)}.")

    @property
    def vocabulary(self) -> int:
        return 256

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample:
        rows = [self._one(generator, length) for _ in range(batch)]
        return Sample(torch.stack([tokens for tokens, _ in rows]), torch.stack([targets for _, targets in rows]))

    def story(self, generator: torch.Generator) -> Story:
        letters = _LETTERS if self.kind == "word" else _DIGITS
        answer = "".join(letters[i] for i in _draw(generator, len(letters), self.answer_bytes))
        name = "word" if self.kind == "word" else "number"
        city = _words(generator, [3])[0]
        return Story(
            f"The magic {name} for {city} is {answer}. ", f"What is the magic {name} for {city}? It is ", answer
        )

    def filler(self, generator: torch.Generator, count: int) -> str:
        """Returns `count` characters of meaningless text."""
        if self.kind == "passkey":
            start = int(torch.randint(len(_REPEATED), (), generator=generator))
            return (_REPEATED * (count // len(_REPEATED) + 2))[start : start + count]
        # A word and the space after it have at least three characters, so this many words are enough.
        words = _words(generator, [1 + more for more in _draw(generator, 3, count // 3 + 1)])
        return "".join(word + (". " if place % 9 == 8 else " ") for place, word in enumerate(words))[:count]

    def _one(self, generator: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        story = self.story(generator)
        fixed = len(story.needle) + len(story.question) + len(story.answer)
        # The last byte of the answer is only a target, not an input.
        free = length - fixed + 1
        if free < 0:
            raise ModelError(f"a needle and its question need {fixed - 1} tokens, not {length}: use longer texts.")
        filler = self.filler(generator, free)
        place = int(torch.randint(free + 1, (), generator=generator))
        whole = filler[:place] + story.needle + filler[place:] + story.question + story.answer
        text = torch.frombuffer(bytearray(whole, "ascii"), dtype=torch.uint8).long()
        tokens, following = text[:-1], text[1:].clone()
        following[: -self.answer_bytes] = IGNORED
        return tokens, following


def _words(generator: torch.Generator, syllables: list[int]) -> list[str]:
    """Samples all words in one call, because one call per word would take longer than a training step."""
    count = sum(syllables)
    first, second = (_draw(generator, len(letters), count) for letters in (_CONSONANTS, _VOWELS))
    spoken = iter([_CONSONANTS[i] + _VOWELS[j] for i, j in zip(first, second, strict=True)])
    return ["".join(islice(spoken, size)) for size in syllables]


def _draw(generator: torch.Generator, below: int, count: int) -> list[int]:
    return torch.randint(below, (count,), generator=generator).tolist()


def tokenized_sample(
    task: Passkey, tokenizer: Any, generator: torch.Generator, batch: int, length: int, vocabulary: int
) -> Sample:
    """Returns `batch` rows of `length` tokens. Only the filler text is cut, never the needle or the question."""
    rows = [_tokens(task, tokenizer, generator, length) for _ in range(batch)]
    text = torch.tensor(rows)
    largest = int(text[:, :, 0].max())
    if largest >= vocabulary:
        raise ModelError(
            f"the tokenizer returns token {largest}, which is outside the model's vocabulary of {vocabulary}."
        )
    tokens_BS, is_answer_BS = text[:, :, 0], text[:, :, 1].bool()
    targets = torch.where(is_answer_BS[:, 1:], tokens_BS[:, 1:], IGNORED)
    return Sample(tokens_BS[:, :-1].contiguous(), targets)


def _tokens(task: Passkey, tokenizer: Any, generator: torch.Generator, length: int) -> list[tuple[int, bool]]:
    """Returns `length` + 1 tokens, each with a flag: does it belong to the answer? The last token is only a target."""
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
