"""The recall tasks by name: created from settings, and stored in a model's config.json for `redline eval memory`."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from redline.errors import ModelError
from redline.evaluation.recall.mqar import Mqar
from redline.evaluation.recall.needle import Needle
from redline.evaluation.recall.passkey import KINDS, Passkey
from redline.evaluation.recall.task import Recall
from redline.files.config_fields import decode

# Tasks made of symbols, which mean something only to a model trained on these tasks. The other tasks are made of text.
SYMBOLIC: dict[str, type[Mqar] | type[Needle]] = {"mqar": Mqar, "needle": Needle}
NAMES = (*SYMBOLIC, *KINDS)
# The key of config.json under which the task is stored.
KEY = "recall"


def task_type(name: str) -> type[Mqar] | type[Needle] | type[Passkey]:
    if name not in NAMES:
        raise ModelError(f"unknown recall task {name!r}: use one of {', '.join(NAMES)}.")
    return SYMBOLIC.get(name, Passkey)


def option_names(name: str) -> tuple[str, ...]:
    """Returns the options of a task, without `kind`, which is part of the name."""
    return tuple(field.name for field in fields(task_type(name)) if field.name != "kind")


def make_task(name: str, options: Mapping[str, Any] | None = None) -> Recall:
    kind, given = task_type(name), dict(options or {})
    if kind is Passkey and "kind" not in given:
        given["kind"] = name
    return decode(kind, given, f"of the recall task {name}", ModelError)


def name_of(task: Recall) -> str:
    return task.kind if isinstance(task, Passkey) else type(task).__name__.lower()


def describe(task: Recall) -> dict[str, Any]:
    """Returns the entry of the task in config.json."""
    options = asdict(task)
    options.pop("kind", None)
    return {"task": name_of(task), **options}


def task_in(config: Mapping[str, Any]) -> Recall | None:
    """Returns the task on which a model was trained, as recorded in its config.json; None if it records none."""
    found = config.get(KEY)
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("task"), str):
        raise ModelError(f"config.json: {KEY} must be an object with the name of a recall task under 'task'.")
    return make_task(found["task"], {name: value for name, value in found.items() if name != "task"})
