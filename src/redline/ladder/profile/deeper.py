"""NVTX ranges per layer, and the `nsys` and `ncu` commands that show them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import Place, Tracker


@dataclass(frozen=True)
class Deeper:
    """Shell commands: a timeline of the whole step (nsys), and all counters of one layer's kernels (ncu)."""

    nsys: str
    ncu: str


def why_no_nvtx(device: str) -> str:
    return "" if device.startswith("cuda") else f"--nvtx: needs a CUDA device, not {device}."


def run_with_nvtx(subject: Subject) -> None:
    """Runs one step with an NVTX range per layer; nsys and ncu capture only this step."""
    sentence = why_no_nvtx(subject.machine.device)
    if sentence:
        raise RedlineError(sentence)

    def enter(place: Place) -> None:
        torch.cuda.nvtx.range_push(place.label)

    def leave(place: Place) -> None:
        torch.cuda.nvtx.range_pop()

    subject.wait()
    with torch.cuda.profiler.profile():
        torch.cuda.nvtx.range_push("step")
        if subject.sealed:
            subject.step()
        else:
            with Tracker(subject, enter, leave):
                subject.step()
        subject.wait()
        torch.cuda.nvtx.range_pop()


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
