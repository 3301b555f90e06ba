"""Reads the tables of a config file; errors name the file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.config_fields import suggestion
from redline.files.untrusted import read_toml, reading

ConfigSource = str | Path | Mapping[str, Any]
Tables = dict[str, dict[str, Any]]


@contextmanager
def read_config(source: ConfigSource, names: tuple[str, ...]) -> Iterator[Tables]:
    """Yields a copy of the tables of a config file or dict, and names the file in every error raised inside.

    A table in `names` that the config omits is empty. A table that is not in `names` raises an error.
    """
    if isinstance(source, Mapping):
        yield _copied(source, names)
        return
    document = read_toml(source, "config file")
    try:
        with reading(source, "config file"):
            yield _copied(document, names)
    except RedlineError as error:
        raise type(error)(f"{source}: {error}") from error


def _copied(document: Mapping[str, Any], names: tuple[str, ...]) -> Tables:
    for name, table in document.items():
        if name not in names:
            raise RedlineError(f"unknown table [{name}]{suggestion(name, names)}.")
        if not isinstance(table, Mapping):
            raise RedlineError(f"{name} must be a table: write [{name}].")
    return {name: dict(document.get(name, {})) for name in names}


def override(table: dict[str, Any], **values: Any) -> None:
    """Sets the entries of a table to the values that are not None. `steps` removes `minutes`, and vice versa."""
    given = {name: value for name, value in values.items() if value is not None}
    if "steps" in given or "minutes" in given:
        table.pop("steps", None)
        table.pop("minutes", None)
    table |= given
