"""Options that several commands share: input shapes, and the sentence that explains a workload."""

from typing import Any

from redline.errors import RedlineError

WORKLOAD_HELP = "module:function, file.py:function, train:CONFIG, or a bundled name (see `redline rungs --workloads`)."


def parse_shape(text: str) -> dict[str, Any]:
    """`batch=8,size=224` -> {"batch": 8, "size": 224}."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise RedlineError(f"{text!r} is not a shape: write option=value, and commas between several.")
        options[key.strip()] = _value(value.strip())
    return options


def parse_shapes(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Each shape under the text that names it; none is the workload's own."""
    return {text: parse_shape(text) for text in texts} or {"": {}}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
