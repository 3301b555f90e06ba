"""The machine: a device, its features, and its ceilings, which are measured once and cached."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from redline.errors import MachineError, RedlineError
from redline.files.untrusted import check_types, field_types, read_json_object, reader
from redline.machine.cores import cores, proc_field
from redline.machine.cpu_features import cpu_flags, cpu_limit
from redline.machine.host_memory import host_bytes

LIBRARIES = (
    "torch",
    "triton",
    "torchao",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx",
    "openvino",
    "torch-tensorrt",
    "apex",
    "numpy",
)
# A dtype counts as emulated if its rate is below this share of the fp32 rate.
_EMULATED = 0.25


@dataclass(frozen=True)
class Ceilings:
    """The measured limits of a device: bytes/s of a copy (read + write), and FLOP/s by dtype."""

    bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float]
    convolution_flops_per_s: Mapping[str, float]
    # The share by which repeated measurements of a rate differ, by dtype.
    spread: Mapping[str, float] = field(default_factory=dict)

    def flops_per_s(self, dtype: str) -> float:
        """Returns the best rate of any operation or library in this dtype, or the fp32 matmul rate if there is none."""
        tables = (self.matmul_flops_per_s, self.convolution_flops_per_s)
        rates = [rate for table in tables for name, rate in table.items() if name.partition(" ")[0] == dtype]
        return max(rates) if rates else self.matmul_flops_per_s["fp32"]


@dataclass(frozen=True)
class Machine:
    """One device of one computer, with its features and ceilings."""

    device: str
    name: str
    cores: int
    host_bytes: int
    device_bytes: int
    features: tuple[str, ...]
    hardware_dtypes: tuple[str, ...]
    attention_kernels: tuple[str, ...]
    versions: Mapping[str, str]
    driver: str = ""
    cuda: str = ""
    capability: tuple[int, int] = (0, 0)
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.machine()}"
    device_count: int = 1
    ceilings: Ceilings | None = field(default=None, compare=False)

    @classmethod
    def detect(cls, device: str = "auto") -> "Machine":
        """Detects the machine, with cached ceilings if they were measured before."""
        found = _detect(resolve_device(device), cpu_limit())
        path = found.cache_path
        if path.is_file():
            try:
                return replace(found, ceilings=_read_ceilings(path))
            except RedlineError:
                path.unlink(missing_ok=True)  # the ceilings are measured again
        return found

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def fingerprint(self) -> str:
        """A text that identifies the machine: measurements with the same fingerprint can be compared."""
        parts = (self.name, self.device.partition(":")[0], self.cores, self.versions.get("torch"), self.driver)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @property
    def cache_path(self) -> Path:
        return cache_folder() / f"ceilings-6-{self.fingerprint}.json"

    def has(self, library: str) -> bool:
        return library in self.versions

    def why_slow(self, dtype: str, mostly: str = "") -> str:
        """Returns a sentence if torch emulates this dtype here, else "".

        Decides by the measured rate, or by the hardware features if there is none. `mostly` is the model's main
        operation, "matmul" or "convolution"; without it, the higher of the two rates counts.
        """
        if self.ceilings is None or dtype not in self.ceilings.matmul_flops_per_s:
            return "" if dtype in self.hardware_dtypes else f"{self.name} has no hardware support for {dtype}"
        tables = {"matmul": self.ceilings.matmul_flops_per_s, "convolution": self.ceilings.convolution_flops_per_s}
        shares = {kind: rates[dtype] / rates["fp32"] for kind, rates in tables.items() if dtype in rates}
        share = shares.get(mostly, max(shares.values()))
        noise = self.ceilings.spread.get(dtype, 0.0) + self.ceilings.spread.get("fp32", 0.0)
        if noise and (1 - noise) * share < _EMULATED < (1 + noise) * share:
            # The rate is too close to `_EMULATED`, given the noise of the machine, so the hardware features decide.
            return "" if dtype in self.hardware_dtypes else f"{self.name} has no hardware support for {dtype}"
        if share >= _EMULATED:
            return ""
        where = " in matrix products" if mostly == "matmul" else " in convolutions" if mostly else ""
        return f"{self.name} emulates {dtype}{where}: measured at {share:.1%} of the fp32 rate"

    def recommended_precision(self) -> tuple[str, str]:
        """Returns the recommended dtype and the reason.

        Recommends bf16 or fp16 if it is faster than fp32 in both matmul and convolution, and prefers bf16.
        """
        if self.ceilings is None:
            best = "bf16" if "bf16" in self.hardware_dtypes else "fp32"
            return best, "chosen by hardware support; run `redline doctor` to measure rates"
        matmul, convolution = self.ceilings.matmul_flops_per_s, self.ceilings.convolution_flops_per_s
        measured = [d for d in ("bf16", "fp16") if d in matmul and d in convolution]
        gains = {d: (matmul[d] / matmul["fp32"], convolution[d] / convolution["fp32"]) for d in measured}
        rates = "; ".join(f"{d} is {m:.2g}× fp32 in matmul, {c:.2g}× in convolution" for d, (m, c) in gains.items())
        good = {d: m for d, (m, c) in gains.items() if min(m, c) > 1.2}
        if "bf16" in good and good["bf16"] >= 0.8 * max(good.values()):
            return "bf16", f"{rates}; bf16 has the range of fp32, so it does not overflow"
        if "fp16" in good:
            return "fp16", f"{rates}; fp16 can overflow, which the rung checks"
        return "fp32", rates or "the CPU limit hides the hardware for bf16 and fp16"

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict that JSON preserves, with lists in place of tuples."""
        return json.loads(json.dumps({**asdict(self), "fingerprint": self.fingerprint}))


def cache_folder() -> Path:
    """Returns the folder for cached facts about this machine: `$REDLINE_CACHE`, or one in the user's cache folder."""
    given = os.environ.get("REDLINE_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "redline"))


@reader("cache")
def _read_ceilings(path: Path) -> Ceilings:
    saved = read_json_object(path, "cache")
    check_types(saved, field_types(Ceilings), repr(str(path)))
    ceilings = Ceilings(**saved)
    for rates in (ceilings.matmul_flops_per_s, ceilings.convolution_flops_per_s):
        if min(rates["fp32"], *rates.values()) <= 0:
            raise RedlineError(f"{str(path)!r} is damaged: it has a rate that is not positive.")
    return ceilings


def resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = "cuda:0"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise MachineError(f"unknown device {device!r}: use cpu, cuda or cuda:0.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MachineError(
            "torch finds no CUDA GPU for device cuda: install a CUDA build of torch and a driver, or use cpu."
        )
    if kind == "cuda" and int(index) >= torch.cuda.device_count():
        raise MachineError(f"unknown device {device}: torch finds {torch.cuda.device_count()} GPU(s).")
    return device


@cache
def _detect(device: str, limit: str) -> Machine:
    common: dict[str, Any] = {"device": device, "cores": cores(), "host_bytes": host_bytes(), "versions": _versions()}
    if device == "cpu":
        flags = cpu_flags()
        return Machine(
            # The limit is part of the name, so that fingerprints and caches differ.
            name=f"{_cpu_name()} (limited to {limit})" if limit else _cpu_name(),
            device_bytes=common["host_bytes"],
            features=tuple(sorted(flags & set(_CPU_FEATURES))),
            hardware_dtypes=("fp32", *_cpu_dtypes(flags)),
            attention_kernels=("flash", "math"),
            **common,
        )
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    dtypes = {"fp32": (0, 0), "fp16": (7, 0), "int8": (7, 5), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
    kernels = {"math": (0, 0), "efficient": (0, 0), "flash": (8, 0), "cudnn": (9, 0)}
    return Machine(
        name=properties.name,
        device_bytes=properties.total_memory,
        features=("tensor cores",) if capability >= (7, 0) else (),
        hardware_dtypes=tuple(name for name, least in dtypes.items() if capability >= least),
        attention_kernels=tuple(name for name, least in kernels.items() if capability >= least),
        driver=_driver(),
        cuda=torch.version.cuda or "",
        capability=capability,
        device_count=torch.cuda.device_count(),
        **common,
    )


_CPU_FEATURES = {
    "avx2": "", "avx512f": "", "avx512_vnni": "int8", "avx_vnni": "int8", "avx512_bf16": "bf16", "avx512_fp16": "fp16",
    "amx_bf16": "bf16", "amx_int8": "int8", "amx_fp16": "fp16", "asimd": "", "asimdhp": "fp16", "asimddp": "int8",
    "bf16": "bf16", "i8mm": "int8", "sve": "", "sve2": "",
}  # fmt: skip


def _cpu_dtypes(flags: set[str]) -> list[str]:
    return sorted({_CPU_FEATURES[f] for f in flags & set(_CPU_FEATURES)} - {""})


def _cpu_name() -> str:
    if (name := proc_field("cpuinfo", "model name")) is not None:
        return name
    with suppress(OSError, subprocess.SubprocessError):
        for line in subprocess.run(["lscpu"], capture_output=True, text=True, timeout=5).stdout.splitlines():
            if line.startswith("Model name:"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A package without metadata (one that was only copied) counts as installed if it can be imported.
            module = name.replace("-", "_")
            if name in ("triton", "torchao", "apex", "onnxruntime") and importlib.util.find_spec(module):
                found[name] = "unknown"
    if "onnxruntime-gpu" in found:
        found.setdefault("onnxruntime", found["onnxruntime-gpu"])
    found["torch"] = torch.__version__
    return found
