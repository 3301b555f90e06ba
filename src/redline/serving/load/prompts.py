"""The prompts of a load: seeded random words or tokens with or without a shared prefix, or those of a file."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import parse_json, read_text, reading

DATASETS = ("words", "tokens")
# Short English words, which most tokenizers encode as one token each.
_TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around another"
    " came come work three word must because does part even place well such here take why things help put years "
    "different away again off went old number great tell men say small every found still between name should home big"
    " give air line set own under read last never us left end along while might next sound below saw something "
    "thought both few those always looked show large often together asked house world going want school important "
    "until form food keep children feet land side"
)
_WORDS = tuple(_TEXT.split())
# Ids below this are special tokens in many vocabularies.
_FIRST_TOKEN = 256
_LONGEST = 10_000_000


@dataclass(frozen=True)
class Span:
    """A number of tokens: uniform from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Parses `256` or `100-1024`."""
        low, dash, high = text.partition("-")
        try:
            span = cls(int(low), int(high) if dash else int(low))
        except ValueError as error:
            raise RedlineError(f"{text!r} is not a number of tokens: write 256, or 100-1024 for a range.") from error
        if not 0 < span.low <= span.high <= _LONGEST:
            raise RedlineError(f"{text!r} is not a range of tokens: it must be from 1 to {_LONGEST:,}, in order.")
        return span

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class RandomPrompts:
    """Makes prompt number n from the seed and n alone, so that every run and every process makes the same prompts.

    A share of `prefix_share` of the prompts starts with the same `prefix` tokens. With words, a length is the number of
    words, which is close to the number of tokens; the server's usage has the exact number.
    """

    kind: str
    input: Span
    output: Span
    seed: int = 0
    prefix: int = 0
    prefix_share: float = 1.0
    vocabulary: int = 10_000

    def __post_init__(self) -> None:
        if self.kind not in DATASETS:
            raise RedlineError(f"unknown dataset {self.kind!r}: use one of {', '.join(DATASETS)}.")
        if not 0 <= self.prefix <= _LONGEST:
            raise RedlineError(f"the shared prefix must have from 0 to {_LONGEST:,} tokens, not {self.prefix:,}.")
        if not 0 <= self.prefix_share <= 1:
            raise RedlineError(f"the share of prompts with the prefix must be from 0 to 1, not {self.prefix_share:g}.")
        if self.vocabulary <= _FIRST_TOKEN:
            raise RedlineError(f"the vocabulary must be larger than {_FIRST_TOKEN}, not {self.vocabulary}.")

    def __call__(self, number: int) -> dict[str, Any]:
        source = random.Random(f"{self.seed}/{number}")
        length, most = self.input.draw(source), self.output.draw(source)
        own = self.draw(source, length)
        if self.prefix and source.random() < self.prefix_share:
            own = [*_shared_prefix(self), *own]
        return {"prompt": own if self.kind == "tokens" else " ".join(map(str, own)), "max_tokens": most}

    def draw(self, source: random.Random, count: int) -> list[Any]:
        if self.kind == "words":
            return source.choices(_WORDS, k=count)
        return [source.randrange(_FIRST_TOKEN, self.vocabulary) for _ in range(count)]

    def __str__(self) -> str:
        shared = f", {self.prefix:,} shared by {self.prefix_share:.0%}" if self.prefix else ""
        return f"random {self.kind}, {self.input} in{shared}, {self.output} out"


@cache
def _shared_prefix(prompts: RandomPrompts) -> list[Any]:
    return prompts.draw(random.Random(f"{prompts.seed}/prefix"), prompts.prefix)


@dataclass(frozen=True)
class FilePrompts:
    """The prompts of a file, in order and then again from the start.

    `output` is the range of `max_tokens` for prompts that do not set it themselves.
    """

    name: str
    bodies: tuple[Mapping[str, Any], ...]
    output: Span
    seed: int = 0

    def __call__(self, number: int) -> dict[str, Any]:
        body = dict(self.bodies[number % len(self.bodies)])
        if "max_tokens" not in body and "max_completion_tokens" not in body:
            body["max_tokens"] = self.output.draw(random.Random(f"{self.seed}/{number}"))
        return body

    def __str__(self) -> str:
        return f"{len(self.bodies):,} prompts of {self.name}, {self.output} out"


Prompts = Callable[[int], dict[str, Any]]


def read_prompts(path: Path, output: Span, seed: int) -> FilePrompts:
    """Reads JSON lines: objects with `prompt` or `messages`, or with such an object in `body` (OpenAI's format)."""
    with reading(path, "file of prompts"):
        lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise RedlineError(f"{str(path)!r} has no prompts: write one JSON object per line.")
    return FilePrompts(path.name, tuple(_body(line, f"{path}:{number}") for number, line in lines), output, seed)


def _body(line: str, where: str) -> Mapping[str, Any]:
    entry = parse_json(line, where)
    body = entry.get("body", entry) if isinstance(entry, dict) else entry
    if not isinstance(body, dict) or not ("prompt" in body) ^ ("messages" in body):
        raise RedlineError(f'{where}: a line must be an object with either "prompt" or "messages".')
    return body
