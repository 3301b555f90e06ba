"""Options that several commands share: input shapes, and the help of a workload."""

from typing import Any

from redline.errors import RedlineError

WORKLOAD_HELP = "module:function, file.py:function, train:CONFIG, or a bundled name (see `redline rungs --workloads`)."


def parse_shape(text: str) -> dict[str, Any]:
    """`batch=8,size=224` -> {"batch": 8, "size": 224}."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise RedlineError(f"{text!r} is not a shape: write option=value, with commas between several options.")
        options[key.strip()] = _value(value.strip())
    return options


def parse_shapes(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Returns each shape under its text; without any, the workload's own shape under the empty text."""
    return {text: parse_shape(text) for text in texts} or {"": {}}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
