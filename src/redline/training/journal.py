"""Logs the metrics of a training run as JSON lines. A resumed run drops the lines after its checkpoint."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import CannotWrite, write_text
from redline.files.untrusted import parse_json, read_bytes, reading

NAME = "journal.jsonl"


@dataclass(frozen=True)
class Entry:
    """One line: the metrics of the steps since the last line, or of a validation.

    A metric is None if it is unknown or not finite, because JSON has neither NaN nor infinity. `penalties` are the
    names of the terms that the training loss includes and the validation loss does not.
    """

    step: int
    elapsed_s: float
    metrics: Mapping[str, float | None]
    is_validation: bool = False
    penalties: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in self.metrics.items()}
        object.__setattr__(self, "metrics", finite)

    def to_json(self) -> str:
        validation = {"validation": True} if self.is_validation else {}
        penalties = {"penalties": self.penalties} if self.penalties else {}
        line = {"step": self.step, "elapsed_s": self.elapsed_s, **validation, **self.metrics, **penalties}
        return json.dumps(line, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, line: bytes, where: str) -> "Entry":
        data = parse_json(line, where)
        if not isinstance(data, dict) or type(data.get("step")) is not int:
            raise RedlineError(f"{where} is damaged: `step` must be a whole number.")
        step, elapsed_s, penalties = data.pop("step"), data.pop("elapsed_s", 0.0), data.pop("penalties", ())
        is_validation = bool(data.pop("validation", False))
        wrong = [name for name, value in data.items() if type(value) not in (int, float, type(None))]
        if wrong or type(elapsed_s) not in (int, float) or not isinstance(penalties, (list, tuple)):
            raise RedlineError(f"{where} is damaged: {(wrong or ['elapsed_s or penalties'])[0]} has the wrong type.")
        return cls(step, elapsed_s, data, is_validation, tuple(map(str, penalties)))


class Journal:
    def __init__(self, path: Path, last_step: int) -> None:
        """Opens the journal and drops entries after `last_step`, because those steps will be repeated."""
        self.path = path
        self.entries = [entry for entry in read_journal(path) if entry.step <= last_step] if path.exists() else []
        write_text(path, "".join(entry.to_json() for entry in self.entries))

    def write(self, entry: Entry) -> None:
        self.entries.append(entry)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(entry.to_json())
        except OSError as error:
            raise CannotWrite(self.path, error) from error


def read_journal(path: str | Path) -> list[Entry]:
    """Returns the entries of a journal, without the incomplete last line that a killed process may leave."""
    entries = []
    with reading(path, "journal"):
        lines = read_bytes(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entries.append(Entry.from_json(line, f"line {number} of the journal {str(path)!r}"))
        except RedlineError:
            if number < len(lines):
                raise
    return entries
