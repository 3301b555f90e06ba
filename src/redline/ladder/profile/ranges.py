"""Runs one step with a named range per layer, for a Chrome trace or, as NVTX ranges, for `nsys` and `ncu`."""

import gzip
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from redline.errors import RedlineError
from redline.files.atomic import write_bytes
from redline.ladder.plan import Plan
from redline.ladder.profile.kernels import profiled
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import Place, Tracker, Watcher


@dataclass(frozen=True)
class Deeper:
    """Shell commands for a timeline of the whole step (nsys), and for all counters of one layer's kernels (ncu)."""

    nsys: str
    ncu: str


def write_trace(subject: Subject, path: Path) -> None:
    """Atomically writes a trace of all operators and kernels of one step; compressed if the name ends in `.gz`.

    Open it at https://ui.perfetto.dev or chrome://tracing.
    """
    ranges: list[record_function] = []

    def enter(place: Place) -> None:
        ranges.append(record_function(place.label))
        ranges[-1].__enter__()

    def leave(place: Place) -> None:
        ranges.pop().__exit__(None, None, None)

    with profiled(subject, record_shapes=True, with_flops=True) as seen:
        _step_in_ranges(subject, enter, leave)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(plain))
        data = plain.read_bytes()
    write_bytes(path, gzip.compress(data) if path.name.endswith(".gz") else data)


def check_nvtx(device: str) -> None:
    if not device.startswith("cuda"):
        raise RedlineError(f"NVTX ranges need a CUDA device, not {device}: leave out --nvtx.")


def run_with_nvtx(subject: Subject) -> None:
    """Runs one step with an NVTX range per layer; nsys and ncu capture only this step."""
    nvtx = torch.cuda.nvtx
    subject.wait()
    with torch.cuda.profiler.profile():
        nvtx.range_push("step")
        _step_in_ranges(subject, lambda place: nvtx.range_push(place.label), lambda place: nvtx.range_pop())
        subject.wait()
        nvtx.range_pop()


def _step_in_ranges(subject: Subject, enter: Watcher, leave: Watcher) -> None:
    """Runs one step, with a range per layer unless the layers cannot be distinguished."""
    if subject.sealed:
        subject.step()
    else:
        with Tracker(subject, enter, leave):
            subject.step()


def commands(address: str, options: Mapping[str, Any], plan: Plan | str, device: str, layers: Sequence[str]) -> Deeper:
    """Returns the commands for this profile; `layers` are the names of the layers, the slowest first."""
    words = ["redline", "profile", address, "--nvtx", "--device", device]
    for key, value in options.items():
        words += ["--shape", f"{key}={value}"]
    if str(plan) != "eager":
        words += ["--plan", str(plan)]
    # In a filter of ncu, a name followed by a slash matches a push/pop range at any depth.
    layer = next((name for name in layers if name and not name.startswith("(")), "step")
    nsys = ["nsys", "profile", "-t", "cuda,nvtx", "-c", "cudaProfilerApi", "-o", "redline-profile", *words]
    ncu = ["ncu", "--set", "full", "--profile-from-start", "off", "--nvtx", "--nvtx-include", f"{layer}/"]
    return Deeper(shlex.join(nsys), shlex.join([*ncu, "-o", "redline-layer", *words]))
