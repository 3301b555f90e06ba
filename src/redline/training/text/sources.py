"""Reads documents to train on, one at a time, from plain text, JSON lines and Parquet.

A document is a `.txt` or `.md` file (or a part of one, if a separator is set), the text of one JSON line, or one row of
a Parquet file. Documents that are null or only white space are skipped.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import parse_json

PLAIN = (".txt", ".md")
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
_KNOWN = (*PLAIN, *JSON_LINES, *PARQUET)
# This encoding skips the byte-order mark that some editors write.
_ENCODING = "utf-8-sig"
_INSTALL_PYARROW = "Parquet files are read with pyarrow, which is not installed: pip install pyarrow."

# The largest number of suffixes that a message names.
_SUFFIXES_NAMED = 5

_ABSENT = object()
# JSON can escape one half of a surrogate pair, which is not a character.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Sources:
    """Files to read, in a fixed order. `text_field` is the key or column that holds a document's text."""

    files: tuple[Path, ...]
    text_field: str = "text"
    separator: str = ""
    # The number of files in the folders that were skipped, by suffix.
    skipped: tuple[tuple[str, int], ...] = ()

    @classmethod
    def find(cls, places: tuple[str, ...], text_field: str = "text", separator: str = "") -> "Sources":
        """Finds the given files, and all visible files of known types in the given folders and below."""
        found: list[Path] = []
        others: Counter[str] = Counter()
        for place in places:
            path = Path(place)
            if path.is_dir():
                inside, left = _inside(path)
                if not inside:
                    raise RedlineError(f"the folder {place!r} has no text: no {', '.join(_KNOWN)} file.")
                found += inside
                others += left
            elif not path.exists():
                raise RedlineError(f"there is no file or folder {place!r} to train on.")
            elif path.suffix.lower() not in _KNOWN:
                raise RedlineError(f"{place!r} has an unknown file type: use one of {', '.join(_KNOWN)}.")
            else:
                found.append(path)
        if not found:
            raise RedlineError(
                "there is no text to train on: give files or folders with --source, or as sources under [data] of the "
                "config."
            )
        if any(file.suffix.lower() in PARQUET for file in found):
            _parquet()
        return cls(tuple(dict.fromkeys(found)), text_field, separator, tuple(others.most_common()))

    @property
    def skipped_message(self) -> str:
        """Returns a message about the files that were skipped, or ""."""
        if not self.skipped:
            return ""
        count = sum(number for _, number in self.skipped)
        named = [kind if kind.isprintable() else ascii(kind) for kind, _ in self.skipped[:_SUFFIXES_NAMED]]
        more = [f"{len(self.skipped) - _SUFFIXES_NAMED:,} more"] if len(self.skipped) > _SUFFIXES_NAMED else []
        return f"skipped {count:,} {'file' if count == 1 else 'files'} of other types: {', '.join(named + more)}"

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def identity(self) -> list[Any]:
        """Returns a value that changes if a file is replaced, added or removed, without reading the files."""
        stats = [(file, file.stat()) for file in self.files]
        seen = [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
        return [self.text_field, self.separator, seen]

    def documents(self) -> Iterator[str]:
        for file in self.files:
            for text in self._read(file):
                if text.strip():
                    yield text

    def _read(self, file: Path) -> Iterator[str]:
        kind = file.suffix.lower()
        try:
            if kind in PLAIN:
                text = file.read_text(encoding=_ENCODING)
                yield from text.split(self.separator) if self.separator else [text]
            elif kind in JSON_LINES:
                yield from self._json_lines(file)
            else:
                yield from self._rows(file)
        except OSError as error:
            raise RedlineError(f"cannot read {str(file)!r}: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            raise RedlineError(f"{str(file)!r} is not UTF-8 text: {error.reason} at byte {error.start}.") from error

    def _json_lines(self, file: Path) -> Iterator[str]:
        with open(file, encoding=_ENCODING) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"line {number} of {str(file)!r}"
                entry = parse_json(line, where, check_characters=False)
                text = entry.get(self.text_field, _ABSENT) if isinstance(entry, dict) else _ABSENT
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise RedlineError(f"{where} has no string under {self.text_field!r}.")
                if _SURROGATE.search(text):
                    raise RedlineError(f"{where} has a lone surrogate under {self.text_field!r}.")
                yield text

    def _rows(self, file: Path) -> Iterator[str]:
        arrow, parquet = _parquet()
        try:
            table = parquet.ParquetFile(file)
            if self.text_field not in table.schema_arrow.names:
                columns = ", ".join(table.schema_arrow.names)
                raise RedlineError(f"{str(file)!r} has no column {self.text_field!r}; it has {columns}.")
            for rows in table.iter_batches(columns=[self.text_field]):
                for text in rows.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise RedlineError(f"the column {self.text_field!r} of {str(file)!r} does not hold text.")
                    yield text or ""
        except arrow.ArrowException as error:
            raise RedlineError(f"{str(file)!r} is not a readable Parquet file.") from error


def _inside(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Returns the visible files of known types in sorted order, and the number of other visible files by suffix."""

    def fail(error: OSError) -> None:
        raise RedlineError(f"cannot read the folder {str(error.filename)!r}: {error.strerror or error}.") from error

    found: list[Path] = []
    others: Counter[str] = Counter()
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(place, name)
            kind = file.suffix.lower()
            if name.startswith("."):
                continue
            if kind in _KNOWN and os.path.isfile(file):
                found.append(file)
            else:
                others[kind or "without a suffix"] += 1
    return sorted(found), others


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RedlineError(_INSTALL_PYARROW) from error
    return pyarrow, pyarrow.parquet
