"""Reads untrusted files, which may be malformed or damaged.

All readers of such files use this module, so that malformed content raises a `RedlineError` that names the file instead
of a traceback. A reader calls `read_json`, `read_toml` or `parse_json`, puts its code into `with reading(…)`, or is
decorated with `@reader(…)`. Only the exceptions in `MALFORMED` are converted, and only inside readers, so that bugs
elsewhere are not hidden.
"""

import dataclasses
import functools
import inspect
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import msgspec

from redline.errors import RedlineError

# The exceptions that parsers raise, and those that code raises for parsed content of an unexpected type.
MALFORMED: tuple[type[Exception], ...] = (
    ValueError,  # also JSON, TOML and Unicode errors, and numbers with more than 4,300 digits
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    EOFError,
)
# The largest file that is read whole, such as JSON or TOML; files of weights and tokens are read in other ways.
MAX_BYTES = 1 << 28
# The largest nesting depth; Redline's own documents have at most 20 levels.
MAX_DEPTH = 100

P = ParamSpec("P")
R = TypeVar("R")
_Path = str | os.PathLike[str]
_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_LIMITS = (
    ("above", "gt"),
    ("at least", "ge"),
    ("at most", "le"),
    ("less than", "lt"),
    ("a multiple of", "multiple_of"),
)


@contextmanager
def reading(
    path: _Path, what: str, error: type[RedlineError] = RedlineError, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raises `error` if the file cannot be opened or its content is malformed.

    `what` names the kind of file for the message, such as "plan". The exceptions in `also` count as malformed content
    too, for example those of the library that parses the file.
    """
    try:
        yield
    except RedlineError:
        raise
    except OSError as problem:
        reason = "it is a folder" if os.path.isdir(path) else problem.strerror or problem
        raise error(f"cannot read the {what} {str(path)!r}: {reason}.") from problem
    except (*MALFORMED, *also) as problem:
        raise error(f"{str(path)!r} is not a readable {what}: {explain(problem)}.") from problem


def reader(
    what: str, error: type[RedlineError] = RedlineError, also: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that runs a function, which must have a parameter `path`, inside `reading`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def read(*args: P.args, **kwargs: P.kwargs) -> R:
            with reading(signature.bind(*args, **kwargs).arguments["path"], what, error, also):
                return function(*args, **kwargs)

        return read

    return decorate


def explain(problem: BaseException) -> str:
    """Returns the reason why a file is malformed, without a full stop."""
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    if isinstance(problem, UnicodeDecodeError):
        return f"it is not UTF-8 text ({problem.reason} at byte {problem.start:,})"
    if isinstance(problem, UnicodeEncodeError):
        return "it contains a lone surrogate, which is not valid text"
    if isinstance(problem, KeyError):
        return f"{shorten(problem.args[0] if problem.args else '')} is missing"
    text = (str(problem).strip().splitlines() or [""])[0].rstrip(".")
    if "integer string conversion" in text:
        return "it holds a number with too many digits"
    for kind, name in ((json.JSONDecodeError, "JSON"), (tomllib.TOMLDecodeError, "TOML")):
        if isinstance(problem, kind):
            return f"it is not {name} ({text[:200]})"
    return text[:200] or type(problem).__name__


def read_text(path: _Path) -> str:
    """Returns the text of a file; for use inside `reading`."""
    return read_bytes(path).decode("utf-8")


def read_bytes(path: _Path) -> bytes:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    return data


def read_json(path: _Path, what: str, error: type[RedlineError] = RedlineError) -> Any:
    with reading(path, what, error):
        return _loads(read_text(path))


def read_json_object(path: _Path, what: str, error: type[RedlineError] = RedlineError) -> dict[str, Any]:
    document = read_json(path, what, error)
    if not isinstance(document, dict):
        raise error(f"{str(path)!r} is not a JSON object.")
    return document


def parse_json(
    text: str | bytes, origin: str, error: type[RedlineError] = RedlineError, check_characters: bool = True
) -> Any:
    """Parses a JSON document that is part of a file; `origin` is its location, such as "line 3 of 'journal.jsonl'"."""
    try:
        return _loads(text.decode("utf-8") if isinstance(text, bytes) else text, check_characters)
    except MALFORMED as problem:
        raise error(f"{origin} cannot be read: {explain(problem)}.") from problem


def read_toml(path: _Path, what: str, error: type[RedlineError] = RedlineError) -> dict[str, Any]:
    with reading(path, what, error):
        document = tomllib.loads(read_text(path))
        _check_depth(document)
        return document


def _loads(text: str, check_characters: bool = True) -> Any:
    document = json.loads(text)
    _check_depth(document)
    if check_characters and ("\\ud" in text or "\\uD" in text):
        # JSON can escape a lone surrogate, which can be neither printed nor written.
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    return document


def _check_depth(document: Any) -> None:
    level = [document] if isinstance(document, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    raise RecursionError


def check_types(
    values: Mapping[str, Any], hints: Mapping[str, Any], origin: str, error: type[RedlineError] = RedlineError
) -> None:
    """Raises `error` for the first value that does not fit its hint; ignores values without a hint.

    Lists are accepted as tuples, and integers as floats.
    """
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            raise error(f"{origin} is damaged: {name!r} is {shorten(value)}, not {describe(hints[name])}.")


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, to be passed to `check_types`."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    # A dict without types may hold anything.
    return dict in (hint, *typing.get_args(hint)) or is_finite(value)


def is_finite(value: Any) -> bool:
    """Returns whether a value contains no infinity, NaN or integer beyond 64 bits, also inside collections.

    msgspec accepts such numbers.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple, dict)):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) < 1 << 63


def describe(hint: Any) -> str:
    """Returns a type for an error message, with its limits."""
    origin = typing.get_origin(hint)
    arguments: tuple[Any, ...] = typing.get_args(hint)
    if origin is typing.Annotated and (least := arguments[1].min_length):
        return describe(arguments[0]).replace("a list", f"a list of at least {least} items", 1)
    if origin is typing.Annotated:
        limits = [(word, getattr(arguments[1], name)) for word, name in _LIMITS]
        words = " and ".join(f"{word} {limit:,}" for word, limit in limits if limit is not None)
        return f"{describe(arguments[0])} ({words})"
    if origin is typing.Literal:
        names = ", ".join(map(str, arguments))
        return f"one of {names}" if len(arguments) > 1 else f'"{names}"'
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(part) for part in arguments if part is not types.NoneType)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" of {len(arguments)} items"
        return f"a list{count}, each {describe(arguments[0])}"
    return _NAMES.get(hint, "an object")


def shorten(value: Any) -> str:
    """Returns any value as text for an error message, at most 60 characters long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deeply
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}…"
