"""A profile of the time and memory of a step, as data."""

from dataclasses import asdict, dataclass
from typing import Any

from redline.ladder.profile.attention import Attention
from redline.ladder.profile.kernels import KernelTime
from redline.ladder.profile.layers import LayerTimes
from redline.ladder.profile.memory import Memory
from redline.ladder.profile.ranges import Deeper


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
