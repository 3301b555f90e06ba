"""fp8: quantizes linear layers to 8-bit floats (e4m3: 3 mantissa bits, maximum 448).

`weight_only` (by torchao) halves the weight bytes of bf16 and computes in the original dtype. `dynamic` also quantizes
each input at run time and multiplies on fp8 tensor cores; `compile` fuses the quantization with the operation before.
Without a compiler it runs as separate kernels and often costs more than the product saves, so a climb measures the rung
alone and again under `compile`. `progressive` quantizes layers in order of increasing sensitivity as long as all gates
pass.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites import quantize
from redline.ladder.rewrites.sensitivity import Quantize, passing_layers
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.quiet import quiet

# torch._scaled_mm needs sizes that are multiples of 16.
_MULTIPLE = 16


@dataclass(frozen=True)
class Fp8(Rung):
    mode: str = option("dynamic", "quantize weights only, or weights and inputs", ("weight_only", "dynamic"))
    granularity: str = option(
        "auto", "one scale per row or per tensor; auto uses rows where supported", ("auto", "row", "tensor")
    )
    skip: tuple[str, ...] = option((), "names of modules that are not quantized")
    progressive: bool = option(False, "quantize layers by increasing sensitivity until a gate would fail")
    min_features: int = option(64, "minimum number of input and output features of a quantized layer")

    name = "fp8"
    stage = Stage.PRECISION
    summary = "linear layers in 8-bit floats: weights only, or weights and inputs"
    training = False
    excludes = frozenset({"int8", "onnxruntime", "tensorrt", "int4"})

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return cls(mode="dynamic"), cls(mode="weight_only")

    def fallbacks(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        return ((replace(self, progressive=True),),) if verdict == "refused" and not self.progressive else ()

    @property
    def checks_gates(self) -> bool:
        return self.progressive

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return f"{machine.name} does not support fp8 (NVIDIA Ada, Hopper or newer required)"
        if machine.capability < (8, 9):
            return f"{machine.name} has no fp8 tensor cores (compute capability 8.9 or newer required)"
        reason = quantize.why_no_torchao()
        if reason or job is None:
            return reason
        if not job.samples and self.progressive:
            return "progressive=true needs sample inputs: pass samples="
        layers = self._layers(job)
        if self.mode == "dynamic" and self.granularity == "row" and not _all_bf16(layers):
            return "granularity=row needs bf16 weights: add bf16 before it, or use granularity=tensor"
        return quantize.why_no_layers(layers, job.model, "")

    def resolve(self, job: Job) -> Rung:
        layers = self._layers(job)
        rung = self
        if self.granularity == "auto":
            rung = replace(self, granularity="row" if self._per_row(layers) else "tensor")
        if not self.progressive:
            return rung
        chosen = passing_layers(self.name, job, layers, self._quantizer(layers))
        left = [name for name in layers if name not in chosen]
        return replace(rung, skip=(*self.skip, *left), progressive=False)

    def apply(self, job: Job) -> Job:
        layers, before = self._layers(job), quantize.weights_before(job.model)
        if not layers:
            raise RungError("fp8: the model has no linear layer that can be quantized.")
        convert = self._quantizer(layers)
        for name, layer in layers.items():
            convert(name, layer)
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

    def _quantizer(self, layers: dict[str, nn.Linear]) -> Quantize:
        """Returns the function that quantizes one layer."""
        per_row = self._per_row(layers)
        if self.mode == "weight_only":
            ao = quantize.torchao_quantization()
            # torchao would otherwise change global settings of the compiler.
            granularity = ao.PerRow() if per_row else ao.PerTensor()
            config = ao.Float8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
            return lambda name, layer: quantize.quantize_layer(self.name, name, layer, config)
        with quiet():
            from redline.ladder.rewrites.fp8_weight import Fp8Weight

        def dynamic(name: str, layer: nn.Linear) -> None:
            quantize.check_finite(self.name, name, layer)
            layer.weight = nn.Parameter(Fp8Weight.of(layer.weight, per_row), requires_grad=False)

        return dynamic


def _all_bf16(layers: dict[str, nn.Linear]) -> bool:
    return all(layer.weight.dtype == torch.bfloat16 for layer in layers.values())
