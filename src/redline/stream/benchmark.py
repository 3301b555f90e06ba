"""Benchmarks the live model by size and plan, and saves every row as soon as it is measured."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.ladder.plan import Plan
from redline.ladder.search.run_log import command_line
from redline.machine.machine import Machine, resolve_device
from redline.machine.version import VERSION
from redline.models.lsd import SIZES
from redline.stream.matrix import ARMS, CPU_ARMS, PLAIN, Arm, Row, Shape, measure

_GRAPH, _LOOP = "graph", "loop"


@dataclass(frozen=True)
class StreamBenchmark:
    """The rows of a benchmark. `about` holds the machine, the versions and the command that produced the rows."""

    about: dict[str, Any]
    rows: tuple[Row, ...]

    def save(self, path: Path) -> None:
        """Writes the rows as JSON lines."""
        write_text(path, "".join(json.dumps(self.about | asdict(row)) + "\n" for row in self.rows))


def benchmark_stream(
    shapes: Sequence[Shape] = (),
    plans: Sequence[str] = (),
    device: str = "auto",
    *,
    save: str | Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> StreamBenchmark:
    """Measures each plan on each shape, until a CUDA error makes the device unusable.

    Args:
        shapes: Sizes of model and frames; by default all model sizes on a GPU, and only the smallest one on a CPU.
        plans: Plans in their one-line form, such as `"fp16 + compile + graph"`; by default a matrix of precisions and
            optimizations. A plan may also contain `graph` (one CUDA graph per frame) and `loop` (no overlap of the
            computation with input and output).
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
        save: Write the rows to this file as they are measured.
        progress: Called with the shape and the plan that are measured next.
    """
    where = torch.device(resolve_device(device))
    cuda = where.type == "cuda"
    arms = [read_arm(text) for text in plans] or list(ARMS if cuda else CPU_ARMS)
    if not cuda and any(arm.graph for arm in arms):
        raise RedlineError(f"a plan with `graph` needs a CUDA device, but the device is {where}.")
    machine = Machine.detect(str(where))
    about = {"gpu": machine.name, "torch": torch.__version__, "redline": VERSION, "cores": machine.cores}
    result = StreamBenchmark(about | {"threads": torch.get_num_threads(), "command": command_line(sys.argv)}, ())
    for shape in shapes or [Shape(size) for size in (SIZES if cuda else ("tiny",))]:
        for row in measure(shape, arms, where, log=progress):
            result = replace(result, rows=(*result.rows, row))
            if save is not None:
                result.save(Path(save))
        if result.rows and result.rows[-1].device_lost:
            break
    return result


def read_arm(text: str) -> Arm:
    """Parses a text such as `fp16 + compile + graph`: a plan, and how the stream runs it (`graph`, `loop`)."""
    parts = [part.strip() for part in text.split("+")]
    plan = " + ".join(part for part in parts if part not in (_GRAPH, _LOOP)) or "eager"
    Plan.parse(plan)
    arm = Arm(text, plan, _GRAPH in parts, _LOOP not in parts)
    return PLAIN if replace(arm, name=PLAIN.name) == PLAIN else arm
