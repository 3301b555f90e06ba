"""A limit hides features of the CPU and never adds any."""

from pathlib import Path

import pytest

from redline.errors import MachineError
from redline.machine import ceilings, cpu_features
from redline.machine.cpu_features import LIMITS, cpu_flags, hides_features, limited_environment
from redline.machine.machine import Machine, _cpu_dtypes

pytestmark = pytest.mark.cpu

XEON = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 amx_tile"
GRAVITON = "asimd asimdhp asimddp sve bf16 i8mm"


@pytest.mark.parametrize(
    ("flags", "limit", "left", "dtypes"),
    [
        (XEON, "", XEON, ["bf16", "fp16", "int8"]),
        (XEON, "avx512", "avx2 avx512f avx512_vnni", ["int8"]),
        (XEON, "avx2", "avx2", []),
        (GRAVITON, "", GRAVITON, ["bf16", "fp16", "int8"]),
        (GRAVITON, "avx512", "asimd asimddp", ["int8"]),
        (GRAVITON, "avx2", "asimd", []),
        ("avx2", "avx512", "avx2", []),
        ("", "avx2", "", []),
    ],
)
def test_a_limit_hides_instructions_and_dtypes(
    flags: str, limit: str, left: str, dtypes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "hardware_flags", lambda: set(flags.split()))
    monkeypatch.setenv("REDLINE_CPU_LIMIT", limit)
    assert cpu_flags() == set(left.split()) and _cpu_dtypes(cpu_flags()) == dtypes


def test_an_unknown_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CPU_LIMIT", "sse4")
    with pytest.raises(MachineError, match=r"^REDLINE_CPU_LIMIT=sse4: unknown limit \(supported: avx512, avx2\)\.$"):
        Machine.detect("cpu")


@pytest.mark.parametrize(
    ("limit", "flags", "architecture", "capability"),
    [
        ("avx512", XEON, "x86_64", "avx512"),
        ("avx2", XEON, "x86_64", "avx2"),
        # Torch would run AVX-512 instructions if set to, and crash with an illegal instruction.
        ("avx512", "avx2", "x86_64", None),
        ("avx2", "", "x86_64", None),
        ("avx512", GRAVITON, "aarch64", None),
        ("avx2", GRAVITON, "aarch64", "default"),
    ],
)
def test_torch_is_limited_only_to_instructions_that_the_cpu_has(
    limit: str, flags: str, architecture: str, capability: str | None
) -> None:
    variables = limited_environment(limit, set(flags.split()), architecture)
    assert variables["REDLINE_CPU_LIMIT"] == limit and variables.get("ATEN_CPU_CAPABILITY") == capability
    assert ("ONEDNN_MAX_CPU_ISA" in variables) == (architecture == "x86_64")


@pytest.mark.parametrize(
    ("flags", "architecture", "hiding"),
    [
        (XEON, "x86_64", ["avx512", "avx2"]),
        ("avx2 avx512f avx512_vnni", "x86_64", ["avx2"]),
        ("avx2 avx_vnni", "x86_64", ["avx2"]),
        ("avx2 avx512f avx512_bf16", "x86_64", ["avx512", "avx2"]),
        ("avx2 avx512f amx_tile", "x86_64", ["avx512", "avx2"]),
        ("avx2 fma", "x86_64", []),
        # On ARM, a limit also changes the BLAS.
        ("asimd", "aarch64", ["avx512", "avx2"]),
    ],
)
def test_a_limit_that_hides_nothing_need_not_be_tested(flags: str, architecture: str, hiding: list[str]) -> None:
    assert [limit for limit in LIMITS if hides_features(limit, set(flags.split()), architecture)] == hiding


def test_a_limited_machine_has_its_own_cache_without_hidden_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    for rate in ("_copy_rate", "_matmul_rate", "_convolution_rate", "_onnxruntime_int8_rate"):
        monkeypatch.setattr(ceilings, rate, lambda *_: 1.0)
    found = []
    for limit in ("", *LIMITS):
        monkeypatch.setenv("REDLINE_CPU_LIMIT", limit)
        found.append(ceilings.with_ceilings(Machine.detect("cpu"), again=True))
    assert len({machine.fingerprint for machine in found}) == 3
    for machine in found[1:]:
        assert machine.why_slow("bf16") and machine.why_slow("fp16", "convolution")
        assert machine.recommended_precision()[0] == "fp32"
    assert "int8" not in found[-1].hardware_dtypes and found[-1].why_slow("int8")
