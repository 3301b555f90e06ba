"""The CPU's instruction sets, and `REDLINE_CPU_LIMIT`, which hides some of them for tests.

`avx512` hides AMX and the hardware for bf16 and fp16; `avx2` also hides AVX-512 and the int8 dot products. On ARM,
`avx512` leaves Neon and its int8 dot products, `avx2` only Neon. A limit does not add features that the CPU lacks.

The variable changes only what Redline detects. The libraries have variables of their own, which must be set before
torch is imported, to values that depend on the CPU. This module prints all of them, for `env`, or nothing if the CPU
has no feature that the limit hides:

    env $(python -m redline.machine.cpu_features avx2) pytest -m cpu
"""

import os
import platform
import sys
from collections.abc import Mapping, Set

from redline.errors import MachineError
from redline.machine.cores import proc_field

VARIABLE = "REDLINE_CPU_LIMIT"
# The features that remain visible under each limit.
LIMITS: Mapping[str, Set[str]] = {
    "avx512": frozenset({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "asimd", "asimddp"}),
    "avx2": frozenset({"avx2", "asimd"}),
}
# The beginnings of the names of the x86 features whose absence changes what Redline or its libraries do.
_RELEVANT = ("avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_", "avx_vnni")
_NEEDED = {"avx512": "avx512f", "avx2": "avx2"}
_ONEDNN = {"avx512": "AVX512_CORE_VNNI", "avx2": "AVX2"}
_MKL = {"avx512": "AVX512_E1", "avx2": "AVX2"}


def hardware_flags() -> set[str]:
    """Returns all features that the kernel lists, including those that `REDLINE_CPU_LIMIT` hides.

    Libraries that detect the CPU themselves use the hidden features too.
    """
    return set((proc_field("cpuinfo", "flags", "Features") or "").split())


def cpu_flags() -> set[str]:
    """Returns the features that the kernel lists and `REDLINE_CPU_LIMIT` does not hide."""
    flags, limit = hardware_flags(), cpu_limit()
    return flags & LIMITS[limit] if limit else flags


def cpu_limit() -> str:
    """Returns the value of `REDLINE_CPU_LIMIT`, "" if it is not set. Raises MachineError if it is unknown."""
    limit = os.environ.get(VARIABLE, "")
    if limit and limit not in LIMITS:
        raise MachineError(f"{VARIABLE}={limit}: unknown limit (supported: {', '.join(LIMITS)}).")
    return limit


def limited_environment(limit: str, flags: Set[str], architecture: str) -> dict[str, str]:
    """Returns the environment variables that limit Redline, and torch and its libraries as far as possible.

    Torch does not check whether the CPU supports the value of `ATEN_CPU_CAPABILITY`, and warns about values for other
    architectures, so it is set only if the CPU supports it. On ARM no variable limits the instruction sets of OpenBLAS,
    so `OPENBLAS_CORETYPE` makes it use the kernels for an older core.
    """
    variables = {VARIABLE: limit}
    if architecture in ("x86_64", "AMD64"):
        variables |= {"ONEDNN_MAX_CPU_ISA": _ONEDNN[limit], "MKL_ENABLE_INSTRUCTIONS": _MKL[limit]}
        if _NEEDED[limit] in flags:
            variables["ATEN_CPU_CAPABILITY"] = limit
    else:
        variables["OPENBLAS_CORETYPE"] = "CORTEXA53"
        if limit == "avx2":
            variables["ATEN_CPU_CAPABILITY"] = "default"
    return variables


def hides_features(limit: str, flags: Set[str], architecture: str) -> bool:
    """Returns whether the limit changes anything on this CPU. On ARM it always does: it also limits the BLAS."""
    if architecture not in ("x86_64", "AMD64"):
        return True
    return any(flag.startswith(_RELEVANT) for flag in flags - LIMITS[limit])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LIMITS:
        sys.exit(f"usage: python -m redline.machine.cpu_features {'|'.join(LIMITS)}")
    given = (sys.argv[1], hardware_flags(), platform.machine())
    limited = limited_environment(*given) if hides_features(*given) else {}
    print(*(f"{name}={value}" for name, value in limited.items()))
