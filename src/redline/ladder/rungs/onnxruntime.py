"""onnxruntime: exports the model to ONNX and runs it in ONNX Runtime with its CPU, CUDA or TensorRT provider.

ONNX Runtime optimizes the whole graph ahead of time and uses its own kernels. On a CPU its int8 convolutions are often
the largest single gain; `int8=static` calibrates them on the sample inputs. A graph has fixed shapes: the first call
with a new shape exports the model again, and therefore takes longer.
"""

import importlib.util
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.gate import all_finite
from redline.ladder.job import Job, entered
from redline.ladder.rewrites.onnx_engine import OnnxEngine, Rewrite
from redline.ladder.rewrites.onnx_quantize import (
    METHODS,
    calibration_batches,
    is_int8,
    quantize_dynamic,
    quantize_static,
)
from redline.ladder.rewrites.per_shape import PerShape, as_call, flat_tensors, input_form
from redline.ladder.rung import Rung, ShapeCounts, Stage, option
from redline.machine.machine import Machine

Call = tuple[tuple[Any, ...], dict[str, Any]]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
# A protobuf file is limited to 2 GiB; larger models store their weights in an external file.
_EXTERNAL_BYTES = 2**30
_HALF_PRECISION = ("bf16", "fp16", "autocast")


class OnnxModule(PerShape[OnnxEngine]):
    """A model that runs in ONNX Runtime sessions, one per combination of input shapes."""

    @property
    def weight_bytes(self) -> int:
        return max((engine.weight_bytes for engine in self.engines.values()), default=0)


@dataclass(frozen=True)
class Onnxruntime(Rung):
    provider: str = option("auto", "execution provider; auto uses the device of the model", ("auto", *PROVIDERS))
    int8: str = option(
        "none",
        "int8 arithmetic: none, scaled at each call (dynamic) or calibrated (static)",
        ("none", "dynamic", "static"),
    )
    calibration: str = option("minmax", "int8=static: method that determines the ranges on the samples", METHODS)
    percentile: float = option(
        99.999, "calibration=percentile: percentage of values inside the range", above=50, at_most=100
    )
    threads: int = option(0, "threads per operator; 0 uses the number of torch threads", at_least=0)

    name = "onnxruntime"
    stage = Stage.COMPILE
    summary = "ONNX Runtime (CPU, CUDA or TensorRT), optionally in int8"
    training = False
    excludes = frozenset({"compile", "tensorrt", "cuda_graph", "int8", "fp8", "int4"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.int8 != "static" and self.calibration != "minmax":
            raise RungError(f"onnxruntime: calibration={self.calibration} needs int8=static.")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        if not machine.is_cuda:
            return cls(), cls(int8="static")
        found = [kind for kind in ("cuda", "tensorrt") if PROVIDERS[kind] in _available()]
        return tuple(cls(provider=kind) for kind in found or ("cuda",))

    def adjust_other(self, other: Rung) -> Rung | None:
        """Removes half-precision rungs when int8 is used, because ONNX Runtime quantizes fp32 graphs only."""
        return None if self.int8 != "none" and other.name in _HALF_PRECISION else other

    @property
    def freezes_state(self) -> bool:
        return True

    @property
    def autotunes(self) -> bool:
        return self.provider != "cpu"

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        kind = self.kind(machine.is_cuda)
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            extra = "onnx" if kind == "cpu" else "onnx-gpu"
            return f'{" and ".join(missing)} not installed: pip install "redline[{extra}]"'
        if kind == "cpu" and machine.is_cuda:
            return "provider=cpu cannot run a model that is on a GPU: use provider=cuda"
        if kind != "cpu" and not machine.is_cuda:
            return f"provider={kind} needs a CUDA GPU, and the model is on the CPU"
        if PROVIDERS[kind] not in _available():
            return f'the installed onnxruntime has no {PROVIDERS[kind]}: pip install "redline[onnx-gpu]"'
        if kind == "cuda" and self.int8 != "none":
            return "the CUDA provider has no int8 kernels: use provider=tensorrt or the rung int8"
        if job is None:
            return ""
        if not job.samples:
            return "it needs sample inputs to export the graph: pass samples="
        if self.int8 != "none" and job.precision not in ("fp32", "tf32"):
            return f"int8 needs an fp32 model, and the model computes in {job.precision}"
        if kind == "cpu" and job.precision == "bf16":
            return "ONNX Runtime has no bf16 kernels on a CPU: keep the model in fp32 or use int8=static"
        return ""

    def resolve(self, job: Job) -> Rung:
        return replace(self, provider=self.kind(job.device.type == "cuda"))

    def apply(self, job: Job) -> Job:
        if not job.samples:
            raise RungError("onnxruntime: needs sample inputs to export the graph: pass samples=.")
        samples = [as_call(batch, job.device) for batch in job.samples]
        kind = self.kind(job.device.type == "cuda")
        module = OnnxModule(job.model, partial(self._build_engine, kind=kind, samples=samples))
        with entered(job.contexts):
            module.prepare(*samples[0])
        precision = job.precision if self.int8 == "none" else "int8"
        return replace(job, model=module, precision=precision).with_evidence(self.name, module)

    def shape_counts(self, job: Job) -> ShapeCounts:
        return ShapeCounts(len(job.evidence[self.name].engines))

    def proof(self, job: Job) -> str:
        engines = list(job.evidence[self.name].engines.values())
        nodes = [node for engine in engines for node in engine.nodes]
        wanted = PROVIDERS[self.kind(job.device.type == "cuda")]
        if not any(node.provider == wanted for node in nodes):
            return ""
        parts = [f"{count} nodes ran on {name}" for name, count in Counter(n.provider for n in nodes).most_common()]
        if self.int8 != "none":
            converted = Counter(node.operator for node in nodes if is_int8(node.operator))
            if not converted and wanted == PROVIDERS["cpu"]:
                return ""  # int8 was requested, but no product was quantized
            listed = ", ".join(f"{operator} {count}" for operator, count in converted.most_common())
            parts.append(
                f"{converted.total()} of them in int8 ({listed})" if converted else "int8 inside TensorRT engines"
            )
        parts.append(f"{len(engines)} session{'s' if len(engines) > 1 else ''}, one per input shape")
        return "; ".join(parts)

    def kind(self, cuda: bool) -> str:
        """Returns the execution provider: "cpu", "cuda" or "tensorrt"."""
        if self.provider != "auto":
            return self.provider
        return "cuda" if cuda else "cpu"

    def _build_engine(self, model: nn.Module, args: Any, kwargs: Any, kind: str, samples: Sequence[Call]) -> OnnxEngine:
        device = next((tensor.device for tensor in flat_tensors(args, kwargs)), torch.device("cpu"))
        rewrite = self.rewriter(model, (args, kwargs), kind, samples)
        return OnnxEngine(model, args, kwargs, provider_list(kind, device), self.threads, rewrite)

    def rewriter(self, model: nn.Module, given: Call, kind: str, samples: Sequence[Call]) -> Rewrite | None:
        """Returns the function that quantizes the exported graph of a call, or None without int8."""
        external = sum(p.nbytes for p in model.parameters()) > _EXTERNAL_BYTES

        def rewrite(source: Path, target: Path, names: Sequence[str]) -> None:
            if self.int8 == "dynamic":
                quantize_dynamic(source, target, external)
                return
            batches = calibration_batches(_samples_of_form(model, given, samples), names)
            symmetric = kind == "tensorrt"
            quantize_static(source, target, batches, self.calibration, self.percentile, symmetric, external)

        return rewrite if self.int8 != "none" else None


def _samples_of_form(model: nn.Module, given: Call, samples: Sequence[Call]) -> list[list[Tensor]]:
    """Returns the samples with the input shapes of the call, because the graph has fixed shapes."""
    alike = [sample for sample in samples if input_form(*sample) == input_form(*given)]
    if not alike:
        said = "onnxruntime: no sample has the input shapes of this call, so int8 is calibrated on its inputs."
        warnings.warn(said, stacklevel=2)
        alike = [given]
    for args, kwargs in alike:
        with torch.no_grad():
            if not all_finite(model(*args, **kwargs)):
                raise RungError("onnxruntime: calibration failed: the model returns NaN or infinity for a sample.")
    return [flat_tensors(*sample) for sample in alike]


def _available() -> list[str]:
    if importlib.util.find_spec("onnxruntime") is None:
        return []
    import onnxruntime

    return onnxruntime.get_available_providers()


def provider_list(kind: str, device: torch.device) -> list[tuple[str, dict[str, Any]]]:
    """Returns the requested provider, followed by the providers that run the nodes it does not support."""
    order = {"cpu": ["cpu"], "cuda": ["cuda", "cpu"], "tensorrt": ["tensorrt", "cuda", "cpu"]}[kind]
    return [(PROVIDERS[k], {} if k == "cpu" else {"device_id": str(device.index or 0)}) for k in order]
