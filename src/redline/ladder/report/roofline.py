"""The roofline: how close a measurement comes to the ceilings of its machine.

A step needs a number of floating-point operations and moves a number of bytes. Dividing them by the measured peak rate
and by the measured copy bandwidth gives two lower bounds of the time. The larger one is the floor, and the floor
divided by the measured time is the share of the roofline.
"""

import math
from dataclasses import dataclass

from redline.ladder.measurement import Measurement
from redline.ladder.report.recorded_machine import RecordedMachine

# If the floor exceeds the measured time by more than this factor, the ceilings do not apply; less can be noise.
_MAX_SHARE = 1.2


@dataclass(frozen=True)
class Roofline:
    """A measurement relative to the ceilings of its machine."""

    achieved_flops_per_s: float
    achieved_bytes_per_s: float
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
    if not all(map(_known, (seconds, flops, least_bytes, peak, bandwidth))):
        return None
    arithmetic_s, memory_s = flops / peak, least_bytes / bandwidth
    floor_s = max(arithmetic_s, memory_s)
    if floor_s > _MAX_SHARE * seconds:
        return None  # the plan runs faster kernels than the benchmark of the ceilings
    return Roofline(
        achieved_flops_per_s=flops / seconds,
        achieved_bytes_per_s=least_bytes / seconds,
        intensity=flops / least_bytes,
        ceiling_flops_per_s=peak,
        ceiling_bytes_per_s=bandwidth,
        floor_s=floor_s,
        share=floor_s / seconds,
        bound="arithmetic" if arithmetic_s >= memory_s else "memory",
    )


def _known(value: float) -> bool:
    return math.isfinite(value) and value > 0
