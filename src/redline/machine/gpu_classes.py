"""The classes of GPUs, by compute capability, and on which GPU of a class the shipped plans and tiles were measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuClass:
    capability: tuple[int, int]
    examples: str
    # The GPU on which the shipped plans and the tiles of the kernels were measured; "" if there was none.
    measured_on: str = ""

    @property
    def name(self) -> str:
        """The name in file names, such as `sm90`."""
        return f"sm{self.capability[0]}{self.capability[1]}"


CLASSES = (
    GpuClass((8, 0), "A100"),
    GpuClass((8, 6), "A10, A40, RTX 3090"),
    GpuClass((8, 9), "L4, L40S, RTX 4090"),
    GpuClass((9, 0), "H100, H200", measured_on="NVIDIA H200"),
)
_MEASURED = next(one for one in CLASSES if one.measured_on)


def gpu_class(capability: tuple[int, int]) -> GpuClass:
    """Returns the newest class that is not newer than the GPU; for an older GPU, the oldest class."""
    return next((one for one in reversed(CLASSES) if one.capability <= capability), CLASSES[0])


def why_unmeasured(capability: tuple[int, int]) -> str:
    """Returns a sentence if the shipped plans and tiles were not measured on GPUs of this capability, else ""."""
    found = gpu_class(capability)
    if found.measured_on and found.capability == capability:
        return ""
    here, there = (".".join(map(str, numbers)) for numbers in (capability, _MEASURED.capability))
    return (
        f"not measured on compute capability {here}, but on {there} ({_MEASURED.measured_on}): a climb finds what is "
        "fastest here"
    )
