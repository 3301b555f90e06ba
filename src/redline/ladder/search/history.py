"""The history of climbs on this machine: how long set-ups took and what rungs gained, in a small local file.

The history affects only the order in which a climb tries rungs and its time estimates, never a verdict.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.untrusted import check_types, field_types, read_json
from redline.machine.machine import Machine

_MOST = 2000


@dataclass(frozen=True)
class Record:
    """One trial. `gain` is how many times faster the plan became, or 1 if the rung was not kept."""

    rung: str
    plan: str
    training: bool
    # Operations in a step of the model, and seconds of the set-up; `finished` is false if it failed or was stopped.
    operations: int
    setup_s: float
    finished: bool
    gain: float
    # The digest of the workload.
    digest: str


class History:
    """The trials of earlier climbs and of this climb; `save` adds those of this climb to the file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.records = list(_read(path)) if path is not None else []
        self._new: list[Record] = []

    @classmethod
    def of(cls, machine: Machine) -> "History":
        return cls(machine.cache_path.with_name(f"climbs-1-{machine.fingerprint}.json"))

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._new.append(record)

    def save(self) -> None:
        """Writes the file, if possible; first reads it again, because another climb may have added records."""
        if self._path is None or not self._new:
            return
        records = [*_read(self._path), *self._new][-_MOST:]
        self._new.clear()
        with suppress(RedlineError):
            write_text(self._path, json.dumps([asdict(record) for record in records], indent=0))


def _read(path: Path) -> Iterable[Record]:
    """Yields the valid records; a damaged file or entry is ignored."""
    try:
        entries = read_json(path, "history", RedlineError)
    except (RedlineError, OSError):
        return
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict):
            continue
        with suppress(RedlineError, TypeError):
            check_types(entry, field_types(Record), "history")
            record = Record(**entry)
            if record.operations > 0 and record.setup_s >= 0 and 0 < record.gain < 1e6:
                yield record
