"""int8: quantizes the weights of linear layers, and optionally their inputs, to int8 with torchao.

Weights are quantized symmetrically with one scale per output channel. The modes differ in the inputs:

- `weight_only` keeps inputs in floating point: the weights need a quarter of their fp32 bytes, and products are
  computed in floating point.
- `dynamic` computes a scale for each row of the input at run time and multiplies in int8.
- `static` multiplies in int8 with one scale per layer, calibrated on the sample inputs.

Without a compiler the quantization runs as separate kernels and often costs more than it saves; a climb measures the
rung alone and again under `compile`. `progressive` quantizes layers in order of increasing sensitivity as long as all
gates pass, and leaves the other layers unchanged.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites import quantize
from redline.ladder.rewrites.calibrate import METHODS, clipping_limits, observe
from redline.ladder.rewrites.sensitivity import Quantize, passing_layers
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.nn.switchable import SwitchableModule
from redline.ops.int8_matmul.int_mm import products_are_exact

# cuBLAS supports int8 products only for at least this many rows and for sizes that are multiples of 8.
_CUDA_ROWS = 17
_CUDA_MULTIPLE = 8


@dataclass(frozen=True)
class Int8(Rung):
    mode: str = option(
        "weight_only",
        "quantize weights only, or also inputs, with a scale per row (dynamic) or a calibrated scale (static)",
        ("weight_only", "dynamic", "static"),
    )
    calibration: str = option("minmax", "mode=static: method that determines the input range of each layer", METHODS)
    percentile: float = option(
        99.9, "calibration=percentile: percentage of values inside the range", above=0, at_most=100
    )
    skip: tuple[str, ...] = option((), "names of modules that are not quantized")
    progressive: bool = option(False, "quantize layers by increasing sensitivity until a gate would fail")
    min_features: int = option(64, "minimum number of input and output features of a quantized layer")

    name = "int8"
    stage = Stage.PRECISION
    summary = "linear layers in int8: weights only, or weights and inputs (dynamic or calibrated)"
    training = False
    excludes = frozenset({"fp8", "onnxruntime", "tensorrt", "int4"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "static" and self.calibration != "minmax":
            raise RungError(f"int8: calibration={self.calibration} needs mode=static, not mode={self.mode}.")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        if machine.why_slow("int8"):
            return (cls(),)
        return cls(), cls(mode="dynamic"), cls(mode="static", calibration="mse")

    def fallbacks(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        return ((replace(self, progressive=True),),) if verdict == "refused" and not self.progressive else ()

    @property
    def checks_gates(self) -> bool:
        return self.progressive

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        reason = quantize.why_no_torchao() or ("" if self.mode == "weight_only" else machine.why_slow("int8"))
        if reason or job is None:
            return reason
        if not job.samples and (self.mode == "static" or self.progressive):
            need = "mode=static" if self.mode == "static" else "progressive=true"
            return f"{need} needs sample inputs: pass samples="
        otherwise = "" if machine.is_cuda else "; onnxruntime(int8=static) quantizes convolutions on a CPU"
        return quantize.why_no_layers(self._layers(job), job.model, otherwise)

    def resolve(self, job: Job) -> Rung:
        layers = self._layers(job)
        if job.device.type == "cuda" and self.mode != "weight_only" and job.samples:
            too_few = {name for name, seen in observe(job, layers).items() if seen.rows < _CUDA_ROWS}
            layers = {name: layer for name, layer in layers.items() if name not in too_few}
            if not layers:
                raise RungError(
                    f"int8: every layer gets fewer than {_CUDA_ROWS} rows, the minimum for int8 products on CUDA."
                )
        if self.progressive:
            convert, layers = self._quantizer(job, layers)
            layers = {name: layers[name] for name in passing_layers(self.name, job, layers, convert)}
        left = [name for name in self._layers(job) if name not in layers]
        return replace(self, skip=(*self.skip, *left), progressive=False)

    def apply(self, job: Job) -> Job:
        found, before = len(quantize.linear_layers(job.model)), quantize.weights_before(job.model)
        convert, layers = self._quantizer(job, self._layers(job))
        for name, layer in layers.items():
            convert(name, layer)
            # Packs the weights of Redline's modules now: packing waits for the device, which a compiled call cannot do.
            if isinstance(layer, SwitchableModule):
                layer.pack(job.device)
        remarks = []
        if self.mode == "static":
            remarks.append(f"inputs calibrated by {self.calibration} on {len(job.samples)} batches")
        if len(layers) < found:
            remarks.append(f"{found - len(layers)} not quantized (skipped, too small, or not run on the samples)")
        return quantize.quantized_job(job, self.name, self.mode, before, remarks)

    def proof(self, job: Job) -> str:
        return quantize.quantization_proof(job, self.name)

    def _layers(self, job: Job) -> dict[str, nn.Linear]:
        multiple = _CUDA_MULTIPLE if job.device.type == "cuda" and self.mode != "weight_only" else 1
        return quantize.choose_layers(self.name, job.model, self.skip, self.min_features, multiple)

    def _quantizer(self, job: Job, layers: dict[str, nn.Linear]) -> tuple[Quantize, dict[str, nn.Linear]]:
        """Returns a function that quantizes one layer, and the part of `layers` that this function supports."""
        ao = quantize.torchao_quantization()
        # torchao would otherwise change global settings of the compiler.
        common: dict[str, Any] = {"set_inductor_config": False}
        if self.mode == "weight_only":
            config = ao.Int8WeightOnlyConfig(**common)
            return lambda name, layer: quantize.quantize_layer(self.name, name, layer, config), layers
        reduced = not products_are_exact(job.device)
        common["reduce_range"] = reduced
        if self.mode == "dynamic":
            config = ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerRow(), **common)
            return lambda name, layer: quantize.quantize_layer(self.name, name, layer, config), layers
        if not job.samples:
            raise RungError("int8: mode=static needs sample inputs: pass samples=.")
        limits = clipping_limits(job, layers, self.calibration, self.percentile)
        if not limits:
            raise RungError("int8: no layer could be calibrated: none ran on the samples with nonzero inputs.")

        def static(name: str, layer: nn.Linear) -> None:
            limit, rank = limits[name]
            scale = torch.full((1,) * rank, limit / (63 if reduced else 127), device=layer.weight.device)
            granularity = [ao.PerTensor(), ao.PerRow()]
            config = ao.Int8StaticActivationInt8WeightConfig(act_quant_scale=scale, granularity=granularity, **common)
            quantize.quantize_layer(self.name, name, layer, config)

        return static, {name: layer for name, layer in layers.items() if name in limits}
