"""Logs the metrics of a training run as JSON lines. A resumed run drops the lines after its checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.atomic import CannotWrite, write_text
from redline.files.untrusted import parse_json, read_bytes, reading

NAME = "journal.jsonl"


class Journal:
    def __init__(self, path: Path, last_step: int) -> None:
        """Opens the journal and drops entries after `last_step`, because those steps will be repeated."""
        self.path = path
        self.entries = [entry for entry in read_journal(path) if entry["step"] <= last_step] if path.exists() else []
        write_text(path, "".join(_line(entry) for entry in self.entries))

    def write(self, entry: dict[str, Any]) -> None:
        # JSON has neither NaN nor infinity (the PSNR of equal images), so both are written as null.
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in entry.items()}
        self.entries.append(finite)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(_line(finite))
        except OSError as error:
            raise CannotWrite(self.path, error) from error


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Returns the entries of a journal, without the incomplete last line that a killed process may leave."""
    entries = []
    with reading(path, "journal"):
        lines = read_bytes(path).splitlines()
    for number, line in enumerate(lines, 1):
        where = f"line {number} of the journal {str(path)!r}"
        try:
            entry = parse_json(line, where)
            if not isinstance(entry, dict) or type(entry.get("step")) is not int:
                raise RedlineError(f"{where} is damaged: `step` must be a whole number.")
        except RedlineError:
            if number == len(lines):
                break
            raise
        entries.append(entry)
    return entries


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"
