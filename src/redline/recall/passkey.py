"""Needles in text, as the published S-NIAH tasks have them: a passkey, a number or a word to be read back.

Text is bytes, so that no tokenizer comes between the task and the memory. `passkey` hides a number among one sentence
repeated; `number` hides it among made-up prose; `word` hides a random word among such prose.
"""

from dataclasses import dataclass

import torch

from redline.errors import ModelError
from redline.recall.task import IGNORED, Sample

KINDS = ("passkey", "number", "word")
_REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_CONSONANTS, _VOWELS = "bcdfglmnprstvz", "aeiou"
_DIGITS, _LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Passkey:
    kind: str = "passkey"
    answer_bytes: int = 7

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"a needle is one of {', '.join(KINDS)}, not {self.kind!r}.")

    @property
    def vocabulary(self) -> int:
        return 256

    def sample(self, generator: torch.Generator, batch: int, length: int) -> Sample:
        rows = [self._one(generator, length) for _ in range(batch)]
        return Sample(torch.stack([tokens for tokens, _ in rows]), torch.stack([targets for _, targets in rows]))

    def _one(self, generator: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        letters = _LETTERS if self.kind == "word" else _DIGITS
        answer = "".join(letters[i] for i in _draw(generator, len(letters), self.answer_bytes))
        name = "word" if self.kind == "word" else "number"
        city = _word(generator, 3)
        needle = f"The magic {name} for {city} is {answer}. "
        question = f"What is the magic {name} for {city}? It is {answer}"
        room = length - len(needle) - len(question) + 1
        if room < 0:
            raise ModelError(f"a needle and its question need {len(needle) + len(question)} tokens, not {length}.")
        hay = self._hay(generator, room)
        place = int(torch.randint(room + 1, (), generator=generator))
        # The last byte of the answer is a target alone.
        text = torch.tensor(list((hay[:place] + needle + hay[place:] + question).encode("ascii")))
        tokens, following = text[:-1], text[1:].clone()
        following[: -self.answer_bytes] = IGNORED
        return tokens, following

    def _hay(self, generator: torch.Generator, count: int) -> str:
        if self.kind == "passkey":
            start = int(torch.randint(len(_REPEATED), (), generator=generator))
            return (_REPEATED * (count // len(_REPEATED) + 2))[start : start + count]
        words: list[str] = []
        size = 0
        while size < count:
            word = _word(generator, 1 + _draw(generator, 3, 1)[0])
            words.append(word + (". " if len(words) % 9 == 8 else " "))
            size += len(words[-1])
        return "".join(words)[:count]


def _word(generator: torch.Generator, syllables: int) -> str:
    first, second = (_draw(generator, len(letters), syllables) for letters in (_CONSONANTS, _VOWELS))
    return "".join(_CONSONANTS[i] + _VOWELS[j] for i, j in zip(first, second, strict=True))


def _draw(generator: torch.Generator, below: int, count: int) -> list[int]:
    return torch.randint(below, (count,), generator=generator).tolist()
