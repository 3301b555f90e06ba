"""fp8: quantizes linear layers to 8-bit floats (e4m3: 3 mantissa bits, maximum 448) with torchao.

`weight_only` halves the weight bytes of bf16 and computes in the original dtype. `dynamic` also quantizes each input at
run time and multiplies on fp8 tensor cores. Without a compiler the quantization runs as separate kernels and often
costs more than the product saves; a climb measures the rung alone and again under `compile`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites import quantize
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

# torch._scaled_mm needs sizes that are multiples of 16.
_MULTIPLE = 16


@dataclass(frozen=True)
class Fp8(Rung):
    mode: str = option("dynamic", "quantize weights only, or weights and inputs", ("weight_only", "dynamic"))
    granularity: str = option(
        "auto", "one scale per row or per tensor; auto uses rows where supported", ("auto", "row", "tensor")
    )
    skip: tuple[str, ...] = option((), "names of modules that are not quantized")
    min_features: int = option(64, "minimum number of input and output features of a quantized layer")

    name = "fp8"
    stage = Stage.PRECISION
    summary = "linear layers in 8-bit floats: weights only, or weights and inputs"
    training = False
    excludes = frozenset({"int8", "onnxruntime", "tensorrt", "int4"})

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return cls(mode="dynamic"), cls(mode="weight_only")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return f"{machine.name} does not support fp8 (NVIDIA Ada, Hopper or newer required)"
        if machine.capability < (8, 9):
            return f"{machine.name} has no fp8 tensor cores (compute capability 8.9 or newer required)"
        reason = quantize.why_no_torchao()
        if reason or job is None:
            return reason
        layers = self._layers(job)
        if self.mode == "dynamic" and self.granularity == "row" and not _all_bf16(layers):
            return "granularity=row needs bf16 weights: add bf16 before it, or use granularity=tensor"
        return quantize.why_no_layers(layers, job.model, "")

    def resolve(self, job: Job) -> Rung:
        if self.granularity != "auto":
            return self
        return replace(self, granularity="row" if self._per_row(self._layers(job)) else "tensor")

    def apply(self, job: Job) -> Job:
        layers, before = self._layers(job), quantize.weights_before(job.model)
        if not layers:
            raise RungError("fp8: the model has no linear layer that can be quantized.")
        config = self._config(self._per_row(layers))
        for name, layer in layers.items():
            quantize.quantize_layer(self.name, name, layer, config)
        remarks = []
        found = quantize.linear_layers(job.model)
        odd = sum(name not in layers and not quantize.fits_multiple(layer, _MULTIPLE) for name, layer in found.items())
        if odd:
            remarks.append(f"{odd} not quantized because a size is not a multiple of {_MULTIPLE}")
        if others := len(found) - len(layers) - odd:
            remarks.append(f"{others} not quantized (skipped or too small)")
        return quantize.quantized_job(job, self.name, self.mode, before, remarks)

    def proof(self, job: Job) -> str:
        return quantize.quantization_proof(job, self.name)

    def _layers(self, job: Job) -> dict[str, nn.Linear]:
        multiple = 1 if self.mode == "weight_only" else _MULTIPLE
        return quantize.choose_layers(self.name, job.model, self.skip, self.min_features, multiple)

    def _per_row(self, layers: dict[str, nn.Linear]) -> bool:
        auto = self.granularity == "auto" and (self.mode == "weight_only" or _all_bf16(layers))
        return auto or self.granularity == "row"

    def _config(self, per_row: bool) -> Any:
        ao = quantize.torchao_quantization()
        dynamic = ao.Float8DynamicActivationFloat8WeightConfig
        make = ao.Float8WeightOnlyConfig if self.mode == "weight_only" else dynamic
        # torchao would otherwise change global settings of the compiler.
        return make(granularity=ao.PerRow() if per_row else ao.PerTensor(), set_inductor_config=False)


def _all_bf16(layers: dict[str, nn.Linear]) -> bool:
    return all(layer.weight.dtype == torch.bfloat16 for layer in layers.values())
