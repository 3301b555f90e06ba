"""onnxruntime: the model as an ONNX graph in an ONNX Runtime session, on its CPU, CUDA or TensorRT provider.

ONNX Runtime fuses the whole graph ahead of time and picks its own kernels. On a CPU its int8 convolutions are
often the largest single gain there is; `int8=static` calibrates them on the samples. A graph has fixed
shapes: a call with another shape exports once more, and that call pays for it.
"""

import importlib.util
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.gate import all_finite
from redline.ladder.job import Job, entered
from redline.ladder.rewrites.onnx_engine import OnnxEngine
from redline.ladder.rewrites.onnx_quantize import (
    METHODS,
    calibration_batches,
    is_int8,
    quantize_dynamic,
    quantize_static,
)
from redline.ladder.rewrites.per_shape import PerShape, as_call, flat_tensors, input_form
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# A protobuf file holds at most 2 GiB; quantizing is kept well below it.
_EXTERNAL_BYTES = 2**30
_HALF_PRECISION = ("bf16", "fp16", "autocast")


class OnnxModule(PerShape[OnnxEngine]):
    """The applied model; `weight_bytes` is what its sessions hold."""

    @property
    def weight_bytes(self) -> int:
        return max((engine.weight_bytes for engine in self.engines.values()), default=0)


@dataclass(frozen=True)
class Onnxruntime(Rung):
    provider: str = option("auto", "what runs the graph; auto: where the model is", choices=("auto", *_PROVIDERS))
    int8: str = option(
        "none", "int8 arithmetic: no, scaled per call, or calibrated", choices=("none", "dynamic", "static")
    )
    calibration: str = option("minmax", "int8=static: how the ranges are found on the samples", choices=METHODS)
    percentile: float = option(99.999, "share of values (in %) inside the range, with calibration=percentile")
    threads: int = option(0, "threads per operator; 0: as many as torch uses")

    name: ClassVar[str] = "onnxruntime"
    stage: ClassVar[Stage] = Stage.COMPILE
    summary: ClassVar[str] = "the whole graph in ONNX Runtime (CPU, CUDA or TensorRT), in int8 on request"
    training: ClassVar[bool] = False
    excludes: ClassVar[frozenset[str]] = frozenset({"compile", "tensorrt", "cuda_graph", "int8", "fp8"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.int8 != "static" and self.calibration != "minmax":
            raise RungError(f"onnxruntime: calibration={self.calibration} belongs to int8=static.")
        if not 50 < self.percentile <= 100:
            raise RungError(f"onnxruntime: percentile is above 50 and at most 100, not {self.percentile}.")
        if self.threads < 0:
            raise RungError(f"onnxruntime: threads is zero or more, not {self.threads}.")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        if not machine.is_cuda:
            return cls(), cls(int8="static")
        found = [kind for kind in ("cuda", "tensorrt") if _PROVIDERS[kind] in _available()]
        return tuple(cls(provider=kind) for kind in found or ("cuda",))

    def beside(self, other: Rung) -> Rung | None:
        """ONNX Runtime quantizes an fp32 graph: half precision before it would leave its quantizer without kernels."""
        return None if self.int8 != "none" and other.name in _HALF_PRECISION else other

    @property
    def searches(self) -> bool:
        return self.provider != "cpu"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        kind = self._kind(machine.is_cuda)
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            extra = "onnx" if kind == "cpu" else "onnx-gpu"
            return f'{" and ".join(missing)} not installed: pip install "redline[{extra}]"'
        if kind == "cpu" and machine.is_cuda:
            return "the model is on a GPU and provider=cpu runs on the host: take provider=cuda"
        if kind != "cpu" and not machine.is_cuda:
            return f"provider={kind} needs a CUDA GPU, and the model is on the CPU"
        if _PROVIDERS[kind] not in _available():
            return f'this onnxruntime has no {_PROVIDERS[kind]}: pip install "redline[onnx-gpu]"'
        if kind == "cuda" and self.int8 != "none":
            return "the CUDA provider has no int8 kernels: take provider=tensorrt, or the rung int8"
        if job is None:
            return ""
        if not job.samples:
            return "the graph is exported from sample inputs, and none were given"
        if self.int8 != "none" and job.precision not in ("fp32", "tf32"):
            return f"its quantizer starts from fp32, and the model is in {job.precision}"
        if kind == "cpu" and job.precision == "bf16":
            return "ONNX Runtime has no bf16 kernels on a CPU: leave the model in fp32, or take int8=static"
        return ""

    def resolve(self, job: Job) -> Rung:
        return replace(self, provider=self._kind(job.device.type == "cuda"))

    def apply(self, job: Job) -> Job:
        if not job.samples:
            raise RungError("onnxruntime: the graph is exported from sample inputs, and none were given.")
        samples = [as_call(batch, job.device) for batch in job.samples]
        builder = _Builder(self, self._kind(job.device.type == "cuda"), samples)
        module = OnnxModule(job.model, builder.build)
        with entered(job.contexts):
            module.prepare(*samples[0])
        precision = job.precision if self.int8 == "none" else "int8"
        return replace(job, model=module, precision=precision).with_evidence(self.name, module)

    def proof(self, job: Job) -> str:
        engines = list(job.evidence[self.name].engines.values())
        nodes = [node for engine in engines for node in engine.nodes]
        wanted = _PROVIDERS[self._kind(job.device.type == "cuda")]
        if not any(node.provider == wanted for node in nodes):
            return ""
        parts = [f"{count} nodes ran on {name}" for name, count in Counter(n.provider for n in nodes).most_common()]
        if self.int8 != "none":
            converted = Counter(node.operator for node in nodes if is_int8(node.operator))
            if not converted and wanted == _PROVIDERS["cpu"]:
                return ""  # asked for int8, and every product stayed in float
            listed = ", ".join(f"{operator} {count}" for operator, count in converted.most_common())
            parts.append(f"{converted.total()} of them in int8 ({listed})" if converted else "int8 inside its engines")
        parts.append(f"{len(engines)} session{'s' if len(engines) > 1 else ''}, one per input shape")
        return "; ".join(parts)

    def _kind(self, cuda: bool) -> str:
        if self.provider != "auto":
            return self.provider
        return "cuda" if cuda else "cpu"


@dataclass(frozen=True)
class _Builder:
    """Makes the engine for one form of input."""

    rung: Onnxruntime
    kind: str
    samples: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]

    def build(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OnnxEngine:
        device = next((tensor.device for tensor in flat_tensors(args, kwargs)), torch.device("cpu"))
        external = sum(p.nbytes for p in model.parameters()) > _EXTERNAL_BYTES

        def rewrite(source: Path, target: Path, names: Sequence[str]) -> None:
            if self.rung.int8 == "dynamic":
                quantize_dynamic(source, target, external)
                return
            batches = calibration_batches(self._alike(model, args, kwargs), names)
            quantize_static(
                source,
                target,
                batches,
                self.rung.calibration,
                self.rung.percentile,
                symmetric=self.kind == "tensorrt",
                external=external,
            )

        return OnnxEngine(
            model,
            args,
            kwargs,
            providers=_provider_list(self.kind, device),
            threads=self.rung.threads,
            rewrite=rewrite if self.rung.int8 != "none" else None,
        )

    def _alike(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Tensor]]:
        """The samples of this form; a graph of fixed shapes cannot be calibrated on others."""
        form = input_form(args, kwargs)
        alike = [sample for sample in self.samples if input_form(*sample) == form]
        if not alike:
            warnings.warn(
                "onnxruntime: no sample has this call's shape, so int8 is calibrated on its inputs alone.",
                stacklevel=2,
            )
            alike = [(args, kwargs)]
        for sample in alike:
            with torch.no_grad():
                if not all_finite(model(*sample[0], **sample[1])):
                    raise RungError("onnxruntime: the model gives a NaN or an infinity on a sample to calibrate on.")
        return [flat_tensors(*sample) for sample in alike]


def _available() -> list[str]:
    if importlib.util.find_spec("onnxruntime") is None:
        return []
    import onnxruntime

    return onnxruntime.get_available_providers()


def _provider_list(kind: str, device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    """The provider asked for, and behind it the ones that take the nodes it cannot run."""
    order = {"cpu": ["cpu"], "cuda": ["cuda", "cpu"], "tensorrt": ["tensorrt", "cuda", "cpu"]}[kind]
    return [(_PROVIDERS[k], {} if k == "cpu" else {"device_id": str(device.index or 0)}) for k in order]
