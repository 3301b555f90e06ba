"""Registers kinds of workload addresses: prefixes such as `train:`, and file suffixes such as `.onnx`.

Packages above the ladder register their own kinds. This module imports nothing large, so `import redline` can use it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkloadPrefix:
    """Defines addresses of the form `word:rest` or, if `word` starts with a dot, addresses that end with `word`.

    `find_function(rest)` returns the function that makes the workload. If `rest` names a file, that file counts as the
    workload's source.
    """

    word: str
    find_function: Callable[[str], Callable[..., Any]]
    examples: tuple[str, ...]
    # Whether a caller (such as the training loop) runs a step in parts, so that no rung may launch the whole step.
    steps_in_parts: bool = False

    def matches(self, address: str) -> bool:
        return address.endswith(self.word) if self.word.startswith(".") else address.startswith(f"{self.word}:")

    def rest_of(self, address: str) -> str:
        return address.removeprefix(f"{self.word}:")


PREFIXES: dict[str, WorkloadPrefix] = {}


def register_prefix(prefix: WorkloadPrefix) -> None:
    if prefix.word in PREFIXES:
        raise ValueError(f"the workload prefix {prefix.word!r} is registered already.")
    PREFIXES[prefix.word] = prefix


def find_prefix(address: str) -> WorkloadPrefix | None:
    return next((prefix for prefix in PREFIXES.values() if prefix.matches(address)), None)


def runs_steps_in_parts(address: str) -> bool:
    prefix = find_prefix(address)
    return prefix is not None and prefix.steps_in_parts
