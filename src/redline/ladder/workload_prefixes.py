"""Prefixes of workload addresses, such as `train:`, that packages above the ladder register.

This module imports nothing large, so that `import redline` can register prefixes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkloadPrefix:
    """Defines addresses `word:rest`.

    `find_function(rest)` returns the function that makes the workload. If `rest` names a file, that file counts as the
    workload's source.
    """

    word: str
    find_function: Callable[[str], Callable[..., Any]]
    examples: tuple[str, ...]
    # Whether the caller's loop runs a step in parts, so that no rung may launch the whole step.
    steps_in_parts: bool = False

    def rest_of(self, address: str) -> str:
        return address.removeprefix(f"{self.word}:")


PREFIXES: dict[str, WorkloadPrefix] = {}


def register_prefix(prefix: WorkloadPrefix) -> None:
    if prefix.word in PREFIXES:
        raise ValueError(f"the workload prefix {prefix.word!r} is registered already.")
    PREFIXES[prefix.word] = prefix


def find_prefix(address: str) -> WorkloadPrefix | None:
    word, colon, _ = address.partition(":")
    return PREFIXES.get(word) if colon else None


def runs_steps_in_parts(address: str) -> bool:
    prefix = find_prefix(address)
    return prefix is not None and prefix.steps_in_parts
