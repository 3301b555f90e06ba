"""fp8: quantizes linear layers to 8-bit floats (e4m3: 3 mantissa bits, maximum 448) with torchao.

`weight_only` halves the weight bytes of bf16 and computes in the original dtype. `dynamic` also quantizes each input at
run time and multiplies on fp8 tensor cores. Without a compiler the quantization runs as separate kernels and often
costs more than the product saves; a climb measures the rung alone and again under `compile`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.quantize import (
    Quantized,
    choose_layers,
    linear_layers,
    quantize_layer,
    torchao_quantization,
    weights_before,
    why_no_layers,
    why_no_torchao,
    without_replaced,
)
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

# torch._scaled_mm needs sizes that are multiples of 16.
_MULTIPLE = 16


@dataclass(frozen=True)
class Fp8(Rung):
    mode: str = option("dynamic", "quantize weights only, or weights and inputs", choices=("weight_only", "dynamic"))
    granularity: str = option(
        "auto",
        "one scale per row or per tensor; auto uses rows where supported",
        choices=("auto", "row", "tensor"),
    )
    skip: tuple[str, ...] = option((), "names of modules that are not quantized")
    min_features: int = option(64, "minimum number of input and output features of a quantized layer")

    name: ClassVar[str] = "fp8"
    stage: ClassVar[Stage] = Stage.PRECISION
    summary: ClassVar[str] = "linear layers in 8-bit floats: weights only, or weights and inputs"
    training: ClassVar[bool] = False
    excludes: ClassVar[frozenset[str]] = frozenset({"int8", "onnxruntime", "tensorrt"})

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return cls(mode="dynamic"), cls(mode="weight_only")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return f"{machine.name} does not support fp8 (NVIDIA Ada, Hopper or newer required)"
        if machine.capability < (8, 9):
            return f"{machine.name} has no fp8 tensor cores (compute capability 8.9 or newer required)"
        reason = why_no_torchao()
        if reason or job is None:
            return reason
        layers = self._layers(job)
        if self.mode == "dynamic" and self.granularity == "row" and not _all_bf16(layers):
            return "granularity=row needs bf16 weights: add bf16 before it, or use granularity=tensor"
        return why_no_layers(layers, job.model, "")

    def resolve(self, job: Job) -> Rung:
        if self.granularity != "auto":
            return self
        per_row = self.mode == "weight_only" or _all_bf16(self._layers(job))
        return replace(self, granularity="row" if per_row else "tensor")

    def apply(self, job: Job) -> Job:
        layers, before = self._layers(job), weights_before(job.model)
        config = self._config(layers)
        for name, layer in layers.items():
            quantize_layer(self.name, name, layer, config)
        remarks = []
        found = linear_layers(job.model)
        odd = [name for name, layer in found.items() if name not in layers and not _fits(layer)]
        if odd:
            remarks.append(f"{len(odd)} not quantized because a size is not a multiple of {_MULTIPLE}")
        if others := len(found) - len(layers) - len(odd):
            remarks.append(f"{others} not quantized (skipped or too small)")
        job = job.with_evidence(self.name, Quantized("fp8", self.mode, before, tuple(remarks)))
        precision = job.precision if self.mode == "weight_only" else "fp8"
        return without_replaced(replace(job, precision=precision))

    def proof(self, job: Job) -> str:
        return job.evidence[self.name].proof(job.model)

    def _layers(self, job: Job) -> dict[str, nn.Linear]:
        layers = choose_layers(self.name, job.model, self.skip, self.min_features)
        return {name: layer for name, layer in layers.items() if self.mode == "weight_only" or _fits(layer)}

    def _config(self, layers: dict[str, nn.Linear]) -> Any:
        if not layers:
            raise RungError("fp8: the model has no linear layer that can be quantized.")
        ao = torchao_quantization()
        per_row = self.granularity == "row" or (
            self.granularity == "auto" and (self.mode == "weight_only" or _all_bf16(layers))
        )
        granularity = ao.PerRow() if per_row else ao.PerTensor()
        # torchao would otherwise change global settings of the compiler.
        if self.mode == "weight_only":
            return ao.Float8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=granularity, set_inductor_config=False)


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _all_bf16(layers: dict[str, nn.Linear]) -> bool:
    return all(layer.weight.dtype == torch.bfloat16 for layer in layers.values())
