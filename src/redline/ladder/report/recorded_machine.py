"""The machine of a measurement, as recorded in the measurement file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RecordedMachine:
    """The recorded facts that a report shows. Files may lack any of them: a missing rate is NaN."""

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
        """Reads `Measurement.machine`."""
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
