"""int4: stores the weights of linear layers as 4-bit integers, in groups with a scale each, and multiplies in bf16.

A quantized layer reads an eighth of the bytes of fp32 weights (a quarter of bf16). This helps a step with few rows,
such as the decoding of a language model, because reading the weights limits the speed of such a step. The error is
about ten times that of int8, so few models pass a strict gate with all layers; `progressive` quantizes layers in order
of increasing sensitivity as long as all gates pass.
"""

from dataclasses import dataclass, replace

from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites import quantize
from redline.ladder.rewrites.sensitivity import passing_layers
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.machine.quiet import quiet

# The kernels need a number of output features that is a multiple of this.
_ROWS = 16


@dataclass(frozen=True)
class Int4(Rung):
    group: int = option(64, "number of consecutive weights that share a scale", (32, 64, 128, 256))
    skip: tuple[str, ...] = option((), "names of modules that are not quantized")
    progressive: bool = option(False, "quantize layers by increasing sensitivity until a gate would fail")
    min_features: int = option(64, "minimum number of input and output features of a quantized layer")

    name = "int4"
    stage = Stage.PRECISION
    summary = "linear layers with weights of 4 bits"
    training = False
    excludes = frozenset({"int8", "fp8", "onnxruntime", "openvino", "tensorrt"})

    def fallbacks(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        return ((replace(self, progressive=True),),) if verdict == "refused" and not self.progressive else ()

    @property
    def checks_gates(self) -> bool:
        return self.progressive

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if machine.is_cuda and machine.capability < (8, 0):
            return f"{machine.name} has no kernels for int4 (compute capability 8.0 or newer required)"
        reason = quantize.why_no_torchao()
        if reason or job is None:
            return reason
        if not job.samples and self.progressive:
            return "progressive=true needs sample inputs: pass samples="
        return quantize.why_no_layers(self._layers(job), job.model, "")

    def resolve(self, job: Job) -> Rung:
        if not self.progressive:
            return self
        layers = self._layers(job)
        chosen = passing_layers(self.name, job, layers, self._quantize)
        left = [name for name in layers if name not in chosen]
        return replace(self, skip=(*self.skip, *left), progressive=False)

    def apply(self, job: Job) -> Job:
        layers, before = self._layers(job), quantize.weights_before(job.model)
        if not layers:
            raise RungError("int4: the model has no linear layer that can be quantized.")
        found = len(quantize.linear_layers(job.model))
        for name, layer in layers.items():
            self._quantize(name, layer)
        left = found - len(layers)
        remarks = [f"groups of {self.group}"]
        if left:
            remarks.append(f"{left} not quantized (skipped, too small, or of an unsupported size)")
        return quantize.quantized_job(job, self.name, "weight_only", before, remarks)

    def proof(self, job: Job) -> str:
        return quantize.quantization_proof(job, self.name)

    def _layers(self, job: Job) -> dict[str, nn.Linear]:
        chosen = quantize.choose_layers(self.name, job.model, self.skip, self.min_features)
        return {
            name: layer
            for name, layer in chosen.items()
            if layer.in_features % self.group == 0 and layer.out_features % _ROWS == 0
        }

    def _quantize(self, name: str, layer: nn.Linear) -> None:
        quantize.check_finite(self.name, name, layer)
        with quiet():
            from redline.ladder.rewrites.int4_weight import Int4Weight
        layer.weight = nn.Parameter(Int4Weight.of(layer.weight, self.group), requires_grad=False)
