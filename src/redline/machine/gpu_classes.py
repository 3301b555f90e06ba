"""The classes of GPUs, by compute capability.

Each class says on which GPU the plans and the kernels' tile sizes that Redline ships were measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuClass:
    capability: tuple[int, int]
    examples: str
    # The GPU of this class on which the shipped plans and tile sizes were measured; "" if they were not.
    measured_on: str = ""

    @property
    def name(self) -> str:
        """Returns the name of the class for file names, such as `sm90`."""
        return f"sm{self.capability[0]}{self.capability[1]}"


CLASSES = (
    GpuClass((8, 0), "A100"),
    GpuClass((8, 6), "A10, A40, RTX 3090"),
    GpuClass((8, 9), "L4, L40S, RTX 4090"),
    GpuClass((9, 0), "H100, H200", measured_on="NVIDIA H200"),
)
_MEASURED = next(one for one in CLASSES if one.measured_on)


def gpu_class(capability: tuple[int, int]) -> GpuClass:
    """Returns the newest class that is not newer than the GPU; the oldest class if all are newer than the GPU."""
    return next((one for one in reversed(CLASSES) if one.capability <= capability), CLASSES[0])


def why_unmeasured(capability: tuple[int, int]) -> str:
    """Returns a sentence that says on which GPU the shipped plans and tile sizes were measured instead of on this one.

    Returns an empty string if they were measured on this compute capability.
    """
    found = gpu_class(capability)
    if found.measured_on and found.capability == capability:
        return ""
    here, there = (".".join(map(str, numbers)) for numbers in (capability, _MEASURED.capability))
    return (
        f"not measured on compute capability {here}, but on {there} ({_MEASURED.measured_on}): a climb finds what is "
        "fastest here"
    )
