"""The roofline: how close a measurement comes to the ceilings of its machine.

A step performs a number of floating-point operations and moves a number of bytes. Dividing these numbers by the
measured peak rate and by the measured copy bandwidth gives two lower bounds of the time. The larger bound is the floor,
and the floor divided by the measured time is the share of the roofline.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redline.ladder.measurement import Measurement

# If the floor exceeds the measured time by more than this factor, the ceilings do not apply; a smaller excess is noise.
_MAX_SHARE = 1.2


@dataclass(frozen=True)
class RecordedMachine:
    """The recorded facts about a machine that a report shows. A file may lack any of them: a missing rate is NaN."""

    name: str = "unknown machine"
    device: str = "?"
    device_bytes: int = 0
    host_bytes: int = 0
    cores: int | str = "?"
    system: str = "?"
    driver: str = ""
    cuda: str = ""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    copy_bytes_per_s: float = math.nan
    matmul_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    convolution_flops_per_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "RecordedMachine":
        """Reads the facts from `Measurement.machine`."""
        ceilings = record.get("ceilings") or {}
        plain = ("name", "device", "device_bytes", "host_bytes", "cores", "system", "driver", "cuda", "python")
        return cls(
            **{key: record[key] for key in plain if record.get(key)},
            versions=record.get("versions") or {},
            copy_bytes_per_s=float(ceilings.get("bytes_per_s", math.nan)),
            matmul_flops_per_s=ceilings.get("matmul_flops_per_s") or {},
            convolution_flops_per_s=ceilings.get("convolution_flops_per_s") or {},
        )

    def flops_per_s(self, dtype: str) -> float:
        """Returns the highest rate measured in `dtype`; NaN if there is none."""
        rates = [rates[dtype] for rates in (self.matmul_flops_per_s, self.convolution_flops_per_s) if dtype in rates]
        return max(map(float, rates), default=math.nan)


@dataclass(frozen=True)
class Roofline:
    """A measurement relative to the ceilings of its machine."""

    achieved_flops_per_s: float
    # FLOPs per byte that must be moved.
    intensity: float
    ceiling_flops_per_s: float
    ceiling_bytes_per_s: float
    floor_s: float
    # The floor divided by the median time; 1 means that the step runs at the ceiling.
    share: float
    bound: str  # "arithmetic" or "memory"


def place(measurement: Measurement, shape: str | None = None) -> Roofline | None:
    """Returns the roofline of one shape (the first by default); None if the ceilings are unknown or do not apply."""
    if not measurement.samples:
        return None
    key = measurement.shapes[0] if shape is None else shape
    seconds = measurement.median_s(key)
    flops, least_bytes = measurement.flops.get(key, 0.0), measurement.least_bytes.get(key, 0.0)
    machine = RecordedMachine.of(measurement.machine)
    peak, bandwidth = machine.flops_per_s(measurement.precision), machine.copy_bytes_per_s
    if not all(0 < value < math.inf for value in (seconds, flops, least_bytes, peak, bandwidth)):
        return None
    arithmetic_s, memory_s = flops / peak, least_bytes / bandwidth
    floor_s = max(arithmetic_s, memory_s)
    if floor_s > _MAX_SHARE * seconds:
        return None  # the plan runs faster kernels than the benchmark of the ceilings
    return Roofline(
        achieved_flops_per_s=flops / seconds,
        intensity=flops / least_bytes,
        ceiling_flops_per_s=peak,
        ceiling_bytes_per_s=bandwidth,
        floor_s=floor_s,
        share=floor_s / seconds,
        bound="arithmetic" if arithmetic_s >= memory_s else "memory",
    )
