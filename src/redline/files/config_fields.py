"""Checks the fields of a config dataclass against their annotated types and limits, with msgspec.

All configs share one form of error message, which names the key, its value, and the allowed values.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from redline.errors import RedlineError
from redline.files.untrusted import describe, is_finite, shorten

T = TypeVar("T")
_PLAIN = (int, float, str, bool, types.NoneType, Ellipsis)


def decode(
    kind: type[T],
    table: Mapping[str, Any],
    where: str,
    error: type[RedlineError] = RedlineError,
    complete: bool = False,
) -> T:
    """Converts a table to the dataclass `kind`. A field that is a tuple accepts a single value as well.

    `where` says for error messages where the table is, such as "under [model]". If `complete`, the table must also
    contain the fields that have a default.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in table:
        if name not in hints:
            raise error(f"unknown key {name!r} {where}{suggestion(name, hints)}.")
    for field in dataclasses.fields(kind):  # pyrefly: ignore[bad-argument-type]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in table and (complete or not has_default):
            raise error(f"{field.name!r} is missing {where}.")
    return kind(**{name: _converted(name, value, hints[name], f" {where}", error) for name, value in table.items()})


def check_fields(config: Any, error: type[RedlineError] = RedlineError) -> None:
    """Raises `error` for the first field that does not fit its type and limits.

    Skips fields whose type is not made of plain values, such as a field that holds another config.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        if _is_plain(hints[field.name]):
            _converted(field.name, getattr(config, field.name), hints[field.name], "", error)


def _converted(name: str, value: Any, hint: Any, where: str, error: type[RedlineError]) -> Any:
    if typing.get_origin(_bare(hint)) is tuple and not isinstance(value, (list, tuple)):
        value = [value]
    if not is_finite(value):
        raise error(f"{name} = {shorten(value)}{where} is not a finite 64-bit number.")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as problem:
        hinted = suggestion(value, _literals(hint), list_all=False) if isinstance(value, str) else ""
        raise error(f"{name} = {shorten(value)}{where} must be {describe(hint)}{hinted}.") from problem


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return True
    parts = typing.get_args(_bare(hint))
    return all(map(_is_plain, parts)) if parts else _bare(hint) in _PLAIN


def _literals(hint: Any) -> tuple[str, ...]:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return tuple(part for part in parts if isinstance(part, str))
    return tuple(word for part in parts for word in _literals(part))


def suggestion(name: str, known: Iterable[str], list_all: bool = True) -> str:
    """Returns a hint for an error message, in parentheses: the known name that is closest to `name`.

    If no known name is close, the hint lists all of them, or is empty if `list_all` is false.
    """
    close = difflib.get_close_matches(name, list(known), 1)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (known: {', '.join(known)})" if list_all else ""
