"""Reads configs and checks them: TOML tables become typed, frozen settings through msgspec.

An unknown key, a value of the wrong type or a value outside its limits raises an error that names the file, the table,
the key, the value and what is allowed.
"""

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from redline.errors import RedlineError
from redline.files.untrusted import read_toml, reading, shorten

T = TypeVar("T")
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
            raise RedlineError(f"unknown table [{name}]{_suggestion(name, names)}.")
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


def decode(kind: type[T], table: Mapping[str, Any], section: str) -> T:
    """Converts a table to the dataclass `kind`. For a list, a single value is accepted as well."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in table:
        if name not in hints:
            raise RedlineError(f"unknown key {name!r} under [{section}]{_suggestion(name, hints)}.")
    values = {name: _as_list(value, hints[name]) for name, value in table.items()}
    for name, value in values.items():
        if not all(map(_is_representable, value if isinstance(value, (list, tuple)) else [value])):
            raise RedlineError(f"{name} = {shorten(value)} under [{section}] is not a finite 64-bit number.")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # msgspec names the key at the end of its message: "Expected `int`, got `str` - at `$.betas[0]`".
        found = re.search(r"at `\$\.(\w+)", str(error))
        if found is None:
            raise RedlineError(f"[{section}] cannot be used: {error}.") from error
        name = found[1]
        value, hint = table[name], hints[name]
        hinted = _suggestion(value, _literals(hint), list_all=False) if isinstance(value, str) else ""
        raise RedlineError(f"{name} = {shorten(value)} under [{section}] must be {_describe(hint)}{hinted}.") from error


def _as_list(value: Any, hint: Any) -> Any:
    return [value] if typing.get_origin(hint) is tuple and not isinstance(value, (list, tuple)) else value


def _is_representable(value: Any) -> bool:
    """Returns False for infinities, NaN and integers beyond 64 bits, which msgspec may accept or overflow on."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < 1 << 63


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_LIMITS = (("above", "gt"), ("at least", "ge"), ("at most", "le"), ("less than", "lt"))


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    arguments: tuple[Any, ...] = typing.get_args(hint)
    if origin is Annotated:
        limits = [(word, getattr(arguments[1], name)) for word, name in _LIMITS]
        words = " and ".join(f"{word} {limit:,}" for word, limit in limits if limit is not None)
        return f"{_describe(arguments[0])} ({words})"
    if origin is Literal:
        names = ", ".join(map(str, arguments))
        return f"one of {names}" if len(arguments) > 1 else f'"{names}"'
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(part) for part in arguments if part is not types.NoneType)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" of {len(arguments)} items"
        return f"a list{count}, each {_describe(arguments[0])}"
    return _NAMES.get(hint, "a table")


def _literals(hint: Any) -> tuple[str, ...]:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return parts
    return tuple(word for part in parts for word in _literals(part))


def _suggestion(name: str, known: Iterable[str], list_all: bool = True) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (known: {', '.join(known)})" if list_all else ""
