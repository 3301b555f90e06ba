"""A profile of the time and memory of a step, as data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.ladder.plan import Plan
from redline.ladder.profile.attention import Attention, attention_by_kernel, measure_attention
from redline.ladder.profile.kernels import KernelTime, time_kernels
from redline.ladder.profile.layers import REPEATS, LayerTimes, time_layers
from redline.ladder.profile.memory import Memory, measure_memory
from redline.ladder.profile.ranges import Deeper, commands, run_with_nvtx, write_trace
from redline.ladder.profile.subject import prepare
from redline.ladder.statistics import median
from redline.ladder.workload import Workload
from redline.machine.machine import Machine


@dataclass(frozen=True)
class Profile:
    """The results of a profile; parts that were not requested are None or empty."""

    workload: str
    options: dict[str, Any]
    plan: str
    device: str
    machine: str
    torch: str
    training: bool
    step_s: float
    notes: tuple[str, ...]
    layers: LayerTimes | None
    memory: Memory | None
    attention: Attention | None
    kernels: tuple[KernelTime, ...]
    trace: str
    # Commands for profiling a GPU in more detail; None on a CPU.
    deeper: Deeper | None

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        if self.layers is not None:
            times = self.layers
            data["layers"] |= {"self_sum_s": times.self_sum_s, "overhead": times.overhead}
            for row, layer in zip(data["layers"]["layers"], times.layers, strict=True):
                row |= {
                    "self_s": layer.self_s,
                    "total_s": layer.total_s,
                    "share": times.share(layer.self_s),
                    "flops_per_s": layer.flops_per_s,
                    "of_ceiling": times.of_ceiling(layer),
                }
            data["layers"]["types"] = [asdict(kind) for kind in times.by_type()]
        if self.memory is not None:
            for row, layer in zip(data["memory"]["layers"], self.memory.layers, strict=True):
                row["total_bytes"] = layer.total_bytes
        return data


def profile_workload(
    workload: Workload,
    plan: Plan,
    machine: Machine,
    *,
    layers: bool = True,
    memory: bool = True,
    attention: bool = False,
    trace: Path | None = None,
    nvtx: bool = False,
    repeats: int = REPEATS,
) -> Profile:
    """Profiles a workload under a plan in this process; removes all hooks and restores all flags."""
    subject = prepare(workload, plan, machine)
    notes: list[str] = []
    if subject.sealed and (layers or memory or attention):
        notes.append(subject.sealed)
    times = usage = share = None
    kernels: tuple[KernelTime, ...] = ()
    if (layers or attention) and not subject.sealed:
        times = time_layers(subject, repeats)
        if not times.ceiling_flops_per_s:
            notes.append("the ceilings of this machine are unknown: run `redline doctor` once to measure them.")
    if layers or (attention and subject.sealed):
        kernels = time_kernels(subject)
    if memory:
        usage = measure_memory(subject)
    if attention:
        share = measure_attention(subject, times) if times is not None else attention_by_kernel(kernels)
    step_s = times.step_s if times is not None else median([subject.timed_step() for _ in range(repeats)])
    if trace is not None:
        write_trace(subject, trace)
    if nvtx:
        run_with_nvtx(subject)
    deeper = None
    if machine.is_cuda:
        largest = [layer.name for layer in times.largest(len(times.layers))] if times is not None else []
        address = workload.address or workload.label
        deeper = commands(address, workload.options, plan, machine.device, largest)
    return Profile(
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
