"""Every equivalent that docs/guides.md names exists: plans parse, names import, commands and config keys are known."""

import importlib
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from redline.cli import COMMANDS, load_command
from redline.ladder.plan import Plan
from redline.training.lsd.settings import StageSettings
from redline.training.text.architectures import DecoderSettings, MemorySettings
from redline.training.text.config import TextData, TextLoopSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides.md"
KINDS = ("plan", "config", "command", "python", "file", "none:", "later:")


def rows() -> list[tuple[str, str]]:
    cells = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return [(row[0].removeprefix("| "), row[1]) for row in cells if row[0] not in ("| in the guide", "| ---")]


def equivalents(kind: str) -> list[str]:
    found = [text for _, text in rows() if text.startswith(kind + " ")]
    spans = [re.fullmatch(kind + r" `([^`]+)`", text) for text in found]
    assert all(spans), [text for text, span in zip(found, spans, strict=True) if not span]
    return sorted({span[1] for span in spans if span})


def test_every_row_has_an_equivalent_or_a_reason() -> None:
    assert len(rows()) > 120
    for name, text in rows():
        assert text.startswith(KINDS), name
        assert len(text) > 8, name


@pytest.mark.parametrize("text", equivalents("plan"))
def test_plan_parses(text: str) -> None:
    assert Plan.parse(text).rungs


@pytest.mark.parametrize("name", equivalents("python"))
def test_python_name_exists(name: str) -> None:
    parts, value = name.split("."), importlib.import_module("redline")
    for number, part in enumerate(parts[1:], 1):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[: number + 1]))
        value = getattr(value, part)
    assert callable(value) or isinstance(value, property)


@pytest.mark.parametrize("path", equivalents("file"))
def test_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("line", equivalents("command"))
def test_command_and_its_options_exist(line: str) -> None:
    program, name, *arguments = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return
    assert program == "redline" and name in COMMANDS
    command: Any = load_command(name)
    if hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command = command.commands[arguments.pop(0)]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in arguments if word.startswith("--") and word not in known]
    assert not unknown, (unknown, sorted(known))


@pytest.mark.parametrize("text", equivalents("config"))
def test_config_key_exists_and_takes_the_value(text: str) -> None:
    table, _, assignment = text.partition(" ")
    name = table.strip("[]")
    values = tomllib.loads(assignment)
    settings = {
        "model": (DecoderSettings, MemorySettings),
        "data": (TextData,),
        "training": (TextLoopSettings,),
        "stages": (StageSettings,),
    }[name]
    (key,) = values
    kinds = [kind for kind in settings if key in {field.name for field in fields(kind)}]
    assert kinds, f"no settings of [{name}] have the key {key}"
    hints = get_type_hints(kinds[0], include_extras=True)
    msgspec.convert(values[key], hints[key])
