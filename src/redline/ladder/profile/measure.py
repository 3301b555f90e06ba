"""`redline.profile`: measures the time and memory of a step by layer."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redline.ladder.plan import Plan, read_plan
from redline.ladder.profile.attention import attention_by_kernel, measure_attention
from redline.ladder.profile.kernels import KernelTime, time_kernels
from redline.ladder.profile.layers import REPEATS, time_layers
from redline.ladder.profile.memory import measure_memory
from redline.ladder.profile.page import write_page
from redline.ladder.profile.ranges import check_nvtx, commands, run_with_nvtx, write_trace
from redline.ladder.profile.result import Profile
from redline.ladder.profile.subject import prepare
from redline.ladder.statistics import median
from redline.ladder.workload import Workload
from redline.ladder.workloads.addresses import as_workload
from redline.machine.machine import Machine


def profile(
    workload: str | Workload,
    plan: Plan | str | os.PathLike[str] = "eager",
    *,
    options: Mapping[str, Any] | None = None,
    layers: bool = True,
    memory: bool = True,
    attention: bool = False,
    trace: str | os.PathLike[str] | None = None,
    nvtx: bool = False,
    repeats: int = REPEATS,
    page: str | os.PathLike[str] | None = None,
    top: int = 10,
    device: str = "auto",
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measures the time and memory of a step by layer, in this process; removes all hooks and restores all flags.

    Args:
        workload: A `Workload`, or the address of a function that returns one.
        plan: A `Plan`, a plan in one line, or a plan file.
        options: Options of the workload's function, such as `{"batch": 8}`.
        layers: Whether to measure the time per layer and per kernel.
        memory: Whether to measure the memory per layer.
        attention: Whether to measure the share of time in attention.
        trace: Write a Chrome trace of one step to this file; compressed if the name ends in `.gz`.
        nvtx: Whether to run one step with NVTX ranges for nsys and ncu, on CUDA.
        repeats: The number of timed steps, whose median is reported.
        page: Write the profile as an HTML page to this file.
        top: The number of rows of each table of the page.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`; `"auto"` uses a GPU if there is one.
        progress: Called with a text when a step begins.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
    >>> workload = redline.Workload(build=lambda: model, inputs=lambda seed: torch.ones(4, 8), name="mine")
    >>> profile = redline.profile(workload, device="cpu", repeats=1)
    >>> profile.memory.weight_bytes, {"0", "1"} <= {layer.name for layer in profile.layers.layers}
    (2208, True)
    """
    machine = Machine.detect(device)
    if nvtx:
        check_nvtx(machine.device)
    workload, plan = as_workload(workload, options), read_plan(plan)
    progress(f"setting up {workload.label} on {machine.name}")
    subject = prepare(workload, plan, machine)
    notes: list[str] = []
    if subject.sealed and (layers or memory or attention):
        notes.append(subject.sealed)
    times = usage = share = None
    kernels: tuple[KernelTime, ...] = ()
    if (layers or attention) and not subject.sealed:
        progress("timing the layers")
        times = time_layers(subject, repeats)
        if not times.ceiling_flops_per_s:
            notes.append("the ceilings of this machine are unknown: run `redline doctor` once to measure them.")
    if layers or (attention and subject.sealed):
        progress("timing the kernels")
        kernels = time_kernels(subject)
    if memory:
        progress("measuring the memory")
        usage = measure_memory(subject)
    if attention:
        share = measure_attention(subject, times) if times is not None else attention_by_kernel(kernels)
    step_s = times.step_s if times is not None else median([subject.timed_step() for _ in range(repeats)])
    if trace is not None:
        progress("recording a trace")
        write_trace(subject, Path(trace))
    if nvtx:
        run_with_nvtx(subject)
    deeper = None
    if machine.is_cuda:
        largest = [layer.name for layer in times.largest(len(times.layers))] if times is not None else []
        address = workload.address or workload.label
        deeper = commands(address, workload.options, plan, machine.device, largest)
    result = Profile(
        workload=workload.label,
        options=dict(workload.options),
        plan=str(subject.plan),
        device=machine.device,
        machine=machine.name,
        torch=machine.versions["torch"],
        training=workload.training,
        step_s=step_s,
        notes=tuple(notes),
        layers=times if layers else None,
        memory=usage,
        attention=share,
        kernels=kernels,
        trace=str(trace) if trace is not None else "",
        deeper=deeper,
    )
    if page is not None:
        write_page(result, Path(page), top)
    return result
