"""tensorrt: compiles the model with torch-tensorrt into TensorRT engines for fixed input shapes.

Operators that TensorRT does not support run in PyTorch between the engines; the proof counts these operators. The first
call with a new shape compiles another engine, and therefore takes longer.
"""

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from redline.errors import RungError
from redline.ladder.job import Job, entered
from redline.ladder.rewrites.per_shape import FlatModel, PerShape, as_call, flat_tensors
from redline.ladder.rung import Rung, ShapeCounts, Stage, option
from redline.ladder.workload import describe_error
from redline.machine.machine import Machine
from redline.quiet import quiet


@dataclass(frozen=True)
class _Compiled:
    """The compiled model for one combination of input shapes."""

    module: nn.Module
    flat: FlatModel

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = self.module(*flat_tensors(args, kwargs))
        return self.flat.restore((results,) if isinstance(results, Tensor) else results)

    def engines(self) -> int:
        """Returns the number of engines; torch-tensorrt wraps each in a module, in C++ or in Python."""
        return sum(type(m).__name__.endswith("TorchTensorRTModule") for m in self.module.modules())

    def pytorch_operators(self) -> int:
        """Returns the number of operators that run in PyTorch, between the engines."""
        graphs = [m.graph for m in self.module.modules() if isinstance(m, fx.GraphModule)]
        kinds = ("call_function", "call_method")
        nodes = [node for graph in graphs for node in graph.nodes if node.op in kinds]
        return sum(getattr(node.target, "__name__", "") != "getitem" for node in nodes)


@dataclass(frozen=True)
class Tensorrt(Rung):
    precision: str = option("keep", "keep the dtypes of the model, or use fp16 where it is safe", ("keep", "fp16"))
    optimization_level: int = option(3, "how thoroughly TensorRT searches for kernels", (0, 1, 2, 3, 4, 5))

    name = "tensorrt"
    stage = Stage.COMPILE
    summary = "TensorRT engines, compiled with torch-tensorrt"
    training = False
    excludes = frozenset({"compile", "onnxruntime", "int8", "fp8", "int4"})

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return cls(), cls(precision="fp16")

    @property
    def freezes_state(self) -> bool:
        return True

    @property
    def autotunes(self) -> bool:
        return True

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return f"TensorRT needs an NVIDIA GPU, not {machine.name}"
        if importlib.util.find_spec("torch_tensorrt") is None:
            return 'torch-tensorrt is not installed: pip install "redline[tensorrt]"'
        if job is None:
            return ""
        if not job.samples:
            return "it needs sample inputs to compile the engines: pass samples="
        if self.precision == "fp16" and job.precision in ("bf16", "fp16"):
            return f"the model is already {job.precision}: use precision=keep"
        return ""

    def apply(self, job: Job) -> Job:
        if not job.samples:
            raise RungError("tensorrt: needs sample inputs to compile the engines: pass samples=.")
        module = PerShape(job.model, self._compile)
        with entered(job.contexts):
            module.prepare(*as_call(job.samples[0], job.device))
        precision = "fp16" if self.precision == "fp16" else job.precision
        return replace(job, model=module, precision=precision).with_evidence(self.name, module)

    def shape_counts(self, job: Job) -> ShapeCounts:
        return ShapeCounts(len(job.evidence[self.name].engines))

    def proof(self, job: Job) -> str:
        compiled = list(job.evidence[self.name].engines.values())
        count = sum(one.engines() for one in compiled)
        if not count:
            return ""
        engines = f"{count} TensorRT engine{'s' if count > 1 else ''}"
        shapes = f"{len(compiled)} input shape{'s' if len(compiled) > 1 else ''}"
        left = sum(one.pytorch_operators() for one in compiled)
        return f"{engines} for {shapes}; {left} operators run in PyTorch"

    def _compile(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Compiled:
        settings: dict[str, Any] = {"optimization_level": self.optimization_level}
        if self.precision == "fp16":
            settings |= {"enable_autocast": True, "autocast_low_precision_type": torch.float16}
        flat = FlatModel(self.name, model, args, kwargs)
        try:
            with quiet(), torch.no_grad():
                import torch_tensorrt

                inputs = flat_tensors(args, kwargs)
                compiled = torch_tensorrt.compile(flat, ir="dynamo", arg_inputs=inputs, **settings)
        except Exception as error:
            reason = describe_error(error).rstrip(".")
            raise RungError(f"tensorrt: compiling the model failed: {reason}.") from error
        return _Compiled(compiled, flat)
