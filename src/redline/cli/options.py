"""Options and arguments that several commands share, and the functions that read their values."""

import re
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from redline.choices import SAMPLER_NAMES
from redline.errors import RedlineError

WORKLOAD_HELP = (
    "module:function, file.py:function, timm:NAME, hf:FOLDER, model.onnx, model.pt2, train:CONFIG, or a bundled name "
    "(see `redline rungs --workloads`)."
)
MODEL_HELP = "LSD weights, the output folder of their training, or a diffusers folder"
PLAN_HELP = "A plan file, or a plan in one line: 'bf16 + compile'."

Workload = Annotated[str, Argument(help=WORKLOAD_HELP)]
Shapes = Annotated[
    list[str] | None,
    Option("--shapes", "--shape", help="An input shape (batch=8,size=224) or a range (batch=1..32); repeatable."),
]
WorkloadOptions = Annotated[
    list[str] | None, Option("--shape", "--shapes", help="Options of the workload, for example size=224; repeatable.")
]
Objective = Annotated[
    str,
    Option(
        help="What to optimize: latency (the time of a step), p99 (the time that 1% of the calls exceed), throughput "
        "(steps in a row), requests (calls of concurrent callers) or memory (the peak)."
    ),
]
Callers = Annotated[int, Option(min=1, help="Concurrent callers of the objective requests.")]
Timeout = Annotated[str, Option(help="Time limit of one trial.")]
Sampling = Annotated[str, Option(help="Duration of the timed runs of one comparison.")]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1 or auto (a GPU if there is one).")]
Scale = Annotated[
    int | None, Option("--scale", "-s", help="Upscaling factor (default: the factor of the weights, or 4).")
]
Strict = Annotated[bool, Option("--strict", help="Raise an error for every unknown key of config.json.")]
Page = Annotated[Path | None, Option(help="Write a self-contained HTML page to this file.")]
Steps = Annotated[int | None, Option(help="Sampling steps per frame (default: the model's).")]
Strength = Annotated[
    float | None, Option(help="How far the output departs from the input, 0 to 1 (default: the model's).")
]
Sampler = Annotated[str | None, Option(help=f"Sampler: {', '.join(SAMPLER_NAMES)} (default: distilled).")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]

# A range of sizes: low..high, or low..high:step.
_RANGE = re.compile(r"(\d*)\.\.(\d*)(?::(\d+))?")


def parse_shape(text: str) -> dict[str, Any]:
    """Parses `batch=8,size=224` into {"batch": 8, "size": 224}."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise RedlineError(f"{text!r} is not a shape: write option=value, with commas between several options.")
        options[key.strip()] = _value(value.strip())
    return options


def parse_shapes(texts: list[str] | None) -> dict[str, dict[str, Any]]:
    """Parses each text; returns a dict from text to shape. Without texts: {"": {}}, the workload's own shape."""
    return {text: parse_shape(text) for text in texts or []} or {"": {}}


def parse_workload_options(texts: list[str] | None) -> dict[str, Any]:
    options = {name: value for text in texts or [] for name, value in parse_shape(text).items()}
    if ranges := [name for name, value in options.items() if isinstance(value, range)]:
        raise RedlineError(f"the option {ranges[0]!r} needs one value here, not a range.")
    return options


def _value(text: str) -> Any:
    if match := _RANGE.fullmatch(text):
        low, high, step = (int(part) if part else None for part in match.groups())
        if low is None or high is None or low > high or step == 0:
            raise RedlineError(
                f"{text!r} is not a range: write low..high, such as 1..32, or 16..512:16 for steps of 16."
            )
        return range(low, high + 1, step or 1)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
