"""Converts a plan from its one-line form to TOML by text operations, which also works for unknown rungs."""

import re

from redline.notation import split_outside_brackets

_PART = re.compile(r"\s*([^\s(]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def plan_toml(plan: str, objective: str = "") -> str:
    """Returns a plan such as `bf16 + compile(mode=max-autotune)` as the document that `Plan.load` reads."""
    lines = ["schema = 1"]
    lines += [f"objective = {_text(objective)}"] if objective else []
    for part in filter(str.strip, split_outside_brackets(plan, "+")):
        match = _PART.fullmatch(part)
        if match is None or part.strip() == "eager":
            continue
        lines += ["", "[[rung]]", f"name = {_text(match[1])}"]
        for option in filter(str.strip, split_outside_brackets(match[2] or "", ",")):
            key, _, value = option.partition("=")
            lines.append(f"{key.strip()} = {_value(value.strip())}")
    return "\n".join(lines) + "\n"


def python_lines(training: bool) -> str:
    """Returns the lines of Python that apply the plan file."""
    parts = ", loss=loss, optimizer=optimizer" if training else ""
    name = "step" if training else "fast"
    return f'plan = redline.Plan.load("plan.toml")\n{name} = plan.apply(model, samples=batch{parts})\n'


def _value(value: str) -> str:
    if value in ("true", "false") or _NUMBER.fullmatch(value):
        return value
    if value.startswith("[") and value.endswith("]"):
        return "[" + ", ".join(map(_text, value[1:-1].split())) + "]"
    return _text(value)


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
