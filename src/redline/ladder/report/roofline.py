"""The roofline: how close a measurement comes to what its machine can do at all.

A step needs so many operations and must move so many bytes. The machine's measured peak says how long the
operations take at the very least, its measured copy bandwidth how long the bytes do; the longer of the two is
the floor, and the share of it says how much is left to gain without changing the model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redline.ladder.measurement import Measurement

# Beyond noise a ceiling is not exceeded.
_OUTRUN = 1.2


@dataclass(frozen=True)
class Roofline:
    """One measurement under its machine's ceilings."""

    achieved_flops_per_s: float
    achieved_bytes_per_s: float
    # Operations for each byte that must move.
    intensity: float
    ceiling_flops_per_s: float
    ceiling_bytes_per_s: float
    floor_s: float
    # The floor over the median: 1 is the ceiling.
    share: float
    bound: str  # "arithmetic" or "memory"


def place(measurement: Measurement, shape: str | None = None) -> Roofline | None:
    """Where a measurement lies under the ceilings; None when they are unknown, or plainly no ceilings for it."""
    if not measurement.samples:
        return None
    key = measurement.shapes[0] if shape is None else shape
    seconds = measurement.median_s(key)
    flops, least_bytes = measurement.flops.get(key, 0.0), measurement.least_bytes.get(key, 0.0)
    peak = ceiling_flops_per_s(measurement.machine, measurement.precision)
    bandwidth = ceiling_bytes_per_s(measurement.machine)
    if not all(map(_known, (seconds, flops, least_bytes, peak, bandwidth))):
        return None
    arithmetic_s, memory_s = flops / peak, least_bytes / bandwidth
    floor_s = max(arithmetic_s, memory_s)
    if floor_s > _OUTRUN * seconds:
        return None  # an engine with better kernels than the ones the ceiling was measured with: it is none for it
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


def ceiling_flops_per_s(machine: Mapping[str, Any], precision: str) -> float:
    """The best product rate that the machine reached in a dtype; NaN when it was not measured."""
    ceilings = machine.get("ceilings") or {}
    kinds = ("matmul_flops_per_s", "convolution_flops_per_s")
    rates = [rate for kind in kinds if (rate := (ceilings.get(kind) or {}).get(precision)) is not None]
    return max(map(float, rates), default=math.nan)


def ceiling_bytes_per_s(machine: Mapping[str, Any]) -> float:
    return float((machine.get("ceilings") or {}).get("bytes_per_s", math.nan))


def _known(value: float) -> bool:
    return math.isfinite(value) and value > 0
