"""The result of a run: one JSON line per level of load, and on request one per request."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from redline.files.atomic import write_text
from redline.serving.load.outcome import Outcome
from redline.serving.load.summary import Level


@dataclass(frozen=True)
class LoadResult:
    """The levels of a run with their outcomes. `about` has the server, the client's machine, versions and settings."""

    about: dict[str, Any]
    levels: tuple[Level, ...] = ()
    outcomes: tuple[tuple[Outcome, ...], ...] = ()

    def plus(self, level: Level, outcomes: Sequence[Outcome]) -> "LoadResult":
        return replace(self, levels=(*self.levels, level), outcomes=(*self.outcomes, tuple(outcomes)))

    def rows(self) -> list[dict[str, Any]]:
        return [_row(level) for level in self.levels]

    def save(self, path: Path) -> None:
        write_text(path, "".join(_line(self.about | row) for row in self.rows()))

    def save_requests(self, path: Path) -> None:
        """Writes the times of every request in seconds from the first request of its level."""
        write_text(path, "".join(_request_lines(self.levels, self.outcomes)))


def _row(level: Level) -> dict[str, Any]:
    row = asdict(level)
    row["load"] = {"rate": level.load.rate, "concurrency": level.load.concurrency}
    row["load"] |= {"burstiness": level.load.burstiness if level.load.rate is not None else None}
    return row | {"cached_share": level.cached_share, "tokens_per_chunk": level.tokens_per_chunk}


def _request_lines(levels: Sequence[Level], outcomes: Sequence[Sequence[Outcome]]) -> list[str]:
    lines = []
    for level, found in zip(levels, outcomes, strict=True):
        began_s = min(outcome.due_s for outcome in found)
        for outcome in found:
            entry = msgspec.to_builtins(outcome)
            for name in ("due_s", "sent_s", "first_s", "last_s", "ended_s"):
                entry[name] = None if entry[name] is None else round(entry[name] - began_s, 6)
            entry["gaps_s"] = [round(gap_s, 6) for gap_s in outcome.gaps_s]
            lines.append(_line({"load": str(level.load)} | entry))
    return lines


def _line(entry: dict[str, Any]) -> str:
    # An infinite burstiness is the only number that JSON lacks.
    return json.dumps(_finite(entry), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return None if value == float("inf") else value
