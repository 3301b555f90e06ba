"""openvino: compiles the model with OpenVINO for a CPU, for fixed input shapes.

OpenVINO reads the exported program of torch directly, fuses operators and sets up in seconds. The model stays in fp32;
with `precision=bf16` OpenVINO computes the products in bf16, on CPUs that have it in hardware. The first call with a
new shape compiles the model again, and therefore takes longer.
"""

import importlib.util
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job, entered
from redline.ladder.rewrites.per_shape import FlatModel, PerShape, as_call, flat_tensors
from redline.ladder.rung import Rung, ShapeCounts, Stage, option
from redline.ladder.workload import describe_error
from redline.machine.machine import Machine
from redline.machine.quiet import quiet

_HALF_PRECISION = ("bf16", "fp16", "autocast")
# Operators of the compiled graph that compute nothing.
_NO_WORK = ("Const", "Input", "Output")


class OpenvinoEngine:
    """The compiled model for one combination of input shapes."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: str) -> None:
        self._flat = FlatModel("openvino", model, args, kwargs)
        tensors = flat_tensors(args, kwargs)
        try:
            with quiet(), torch.no_grad():
                self._compiled = _compile(self._flat, tensors, precision)
        except Exception as error:
            reason = describe_error(error).rstrip(".")
            raise RungError(f"openvino: compiling the model failed: {reason}.") from error
        if len(self._compiled.inputs) != len(tensors):
            raise RungError("openvino: the compiled graph lacks an input of the model.")
        expected = self._flat.output_forms
        seen = [(result.shape, result.dtype) for result in self._run(tensors)]
        if seen != expected:
            raise RungError(f"openvino: the outputs are {seen}, but those of the model are {expected}.")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._flat.restore(self._run(flat_tensors(args, kwargs)))

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        arrays = [tensor.detach().contiguous().numpy() for tensor in tensors]
        results = self._compiled(arrays, share_inputs=True)
        return [torch.from_numpy(results[index]) for index in range(len(self._compiled.outputs))]

    def operators(self) -> Counter[tuple[str, str]]:
        """Returns how often each operator, with its precision, occurs in the compiled graph."""
        infos = [operator.get_rt_info() for operator in self._compiled.get_runtime_model().get_ordered_ops()]
        kinds = [(info["layerType"].astype(str), info["runtimePrecision"].astype(str)) for info in infos]
        return Counter(kind for kind in kinds if kind[0] not in _NO_WORK)


def _compile(model: nn.Module, tensors: list[Tensor], precision: str) -> Any:
    # Not openvino.convert_model, because that sends usage statistics.
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    graph = torch.export.export(model, tuple(tensors), strict=False)
    frontend = FrontEndManager().load_by_framework("pytorch")
    # The variable keeps the decoder alive until the conversion ends, because the frontend does not own the decoder.
    decoder = TorchFXPythonDecoder.from_exported_program(graph)
    converted = frontend.convert(frontend.load(decoder))
    # Only the ranks of the inputs are converted; the compiler optimizes more if it knows the sizes.
    converted.reshape({index: list(tensor.shape) for index, tensor in enumerate(tensors)})
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        # Pinned threads of two processes would share cores while others idle.
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    return _core().compile_model(converted, "CPU", settings)


@cache
def _core() -> Any:
    """Returns the only core of this process, which is never freed.

    The CPU plugin gives the thread that loads it a stack for signal handlers. If another thread unloaded the plugin, it
    would free the memory while the first thread still uses it, and the next signal (Ctrl-C) would end the process.
    """
    import openvino

    return openvino.Core()


@dataclass(frozen=True)
class Openvino(Rung):
    precision: str = option("keep", "compute in the dtype of the model, or its products in bf16", ("keep", "bf16"))

    name = "openvino"
    stage = Stage.COMPILE
    summary = "OpenVINO, which optimizes the whole graph for a CPU"
    training = False
    excludes = frozenset({"compile", "onnxruntime", "tensorrt", "cuda_graph", "int8", "fp8", "int4"})

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return (cls(precision="bf16"), cls()) if "bf16" in machine.hardware_dtypes else (cls(),)

    def adjust_other(self, other: Rung) -> Rung | None:
        """Removes half-precision rungs, because OpenVINO converts an fp32 model itself."""
        return None if other.name in _HALF_PRECISION else other

    @property
    def freezes_state(self) -> bool:
        return True

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if machine.is_cuda:
            return "OpenVINO runs the model on a CPU, and the model is on a GPU"
        if importlib.util.find_spec("openvino") is None:
            return 'openvino is not installed: pip install "redline[openvino]"'
        if self.precision == "bf16" and "bf16" not in machine.hardware_dtypes:
            return f"{machine.name} has no bf16 in hardware"
        if job is None:
            return ""
        if not job.samples:
            return "it needs sample inputs to export the graph: pass samples="
        if job.precision not in ("fp32", "tf32"):
            return f"it needs an fp32 model, and the model computes in {job.precision}: use openvino(precision=bf16)"
        return ""

    def apply(self, job: Job) -> Job:
        if not job.samples:
            raise RungError("openvino: needs sample inputs to export the graph: pass samples=.")
        module = PerShape(job.model, partial(OpenvinoEngine, precision=self.precision))
        with entered(job.contexts):
            module.prepare(*as_call(job.samples[0], job.device))
        precision = "bf16" if self.precision == "bf16" else job.precision
        return replace(job, model=module, precision=precision).with_evidence(self.name, module)

    def shape_counts(self, job: Job) -> ShapeCounts:
        return ShapeCounts(len(job.evidence[self.name].engines))

    def proof(self, job: Job) -> str:
        engines = list(job.evidence[self.name].engines.values())
        found: Counter[tuple[str, str]] = sum((engine.operators() for engine in engines), Counter())
        in_bf16 = sum(count for (_, precision), count in found.items() if precision == "bf16")
        if not found or (self.precision == "bf16" and not in_bf16):
            return ""
        parts = [f"{found.total()} operators run in OpenVINO"]
        if self.precision == "bf16":
            parts.append(f"{in_bf16} of them in bf16")
        parts.append(f"{len(engines)} input shape{'s' if len(engines) > 1 else ''}")
        return "; ".join(parts)
