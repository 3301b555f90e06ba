"""fp8: linear layers in 8-bit floats (e4m3: 3 bits of mantissa, up to 448), through torchao.

`weight_only` halves the weight bytes of bf16 and computes as before; `dynamic` also scales each input as it
comes and multiplies on the fp8 tensor cores. Without a compiler the scaling runs as extra kernels and often
costs more than the product saves; the climb measures it alone and again under `compile`.
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

# torch._scaled_mm reads both operands in steps of 16 bytes.
_MULTIPLE = 16


@dataclass(frozen=True)
class Fp8(Rung):
    mode: str = option("dynamic", "what is fp8: weights, or inputs too", choices=("weight_only", "dynamic"))
    granularity: str = option(
        "auto",
        "one scale per row, or per tensor; auto: per row where it can",
        choices=("auto", "row", "tensor"),
    )
    skip: tuple[str, ...] = option((), "names of modules to leave alone")
    min_features: int = option(64, "leave layers with fewer inputs or outputs alone")

    name: ClassVar[str] = "fp8"
    stage: ClassVar[Stage] = Stage.PRECISION
    summary: ClassVar[str] = "linear layers in 8-bit floats: weights alone, or inputs too"
    training: ClassVar[bool] = False
    excludes: ClassVar[frozenset[str]] = frozenset({"int8", "onnxruntime", "tensorrt"})

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return cls(mode="dynamic"), cls(mode="weight_only")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return f"{machine.name} has no fp8 arithmetic (NVIDIA Ada, Hopper or newer has)"
        if machine.capability < (8, 9):
            return f"{machine.name} has no fp8 tensor cores (compute capability 8.9 or newer has)"
        reason = why_no_torchao()
        if reason or job is None:
            return reason
        layers = self._layers(job)
        if self.mode == "dynamic" and self.granularity == "row" and not _all_bf16(layers):
            return "granularity=row needs bf16 weights: put bf16 before it, or take granularity=tensor"
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
            remarks.append(f"{len(odd)} left alone because a size is no multiple of {_MULTIPLE}")
        if others := len(found) - len(layers) - len(odd):
            remarks.append(f"{others} left alone (skipped or too small)")
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
            raise RungError("fp8: the model has no linear layer to convert.")
        ao = torchao_quantization()
        per_row = self.granularity == "row" or (
            self.granularity == "auto" and (self.mode == "weight_only" or _all_bf16(layers))
        )
        granularity = ao.PerRow() if per_row else ao.PerTensor()
        # A library must not change the compiler's global settings: that would leak into other trials.
        if self.mode == "weight_only":
            return ao.Float8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=granularity, set_inductor_config=False)


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _all_bf16(layers: dict[str, nn.Linear]) -> bool:
    return all(layer.weight.dtype == torch.bfloat16 for layer in layers.values())
