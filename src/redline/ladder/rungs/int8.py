"""int8: linear layers with 8-bit weights, and on request 8-bit inputs, through torchao.

Weights are symmetric with one scale per output channel. What differs is the input of each product:

- `weight_only` keeps it in float: a quarter of the weight bytes to read, the same arithmetic.
- `dynamic` measures each row as it comes and multiplies in int8.
- `static` multiplies in int8 with one scale per layer, found beforehand on the samples.

Without a compiler the quantizing steps run as separate kernels and often cost more than they save; the climb
measures it alone and again under `compile`. `progressive` quantizes layers from the least sensitive on, for
as long as every gate stays green, and leaves the others as they are.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.calibrate import METHODS, clipping_limits, observe
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
from redline.ladder.rewrites.sensitivity import Quantize, least_sensitive_first, longest_passing
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.nn.switchable import SwitchableModule

# cuBLAS takes int8 products only from this many rows on, and only for sizes that are multiples of 8.
_CUDA_ROWS = 17
_CUDA_MULTIPLE = 8


@dataclass(frozen=True)
class Int8(Rung):
    mode: str = option(
        "weight_only", "what is int8: weights, or inputs too", choices=("weight_only", "dynamic", "static")
    )
    calibration: str = option("minmax", "static: how each layer's input limit is found", choices=METHODS)
    percentile: float = option(99.9, "static: share of values (in %) inside the limit, with calibration=percentile")
    skip: tuple[str, ...] = option((), "names of modules to leave alone")
    progressive: bool = option(False, "quantize layers by measured sensitivity until a gate would fail")
    min_features: int = option(64, "leave layers with fewer inputs or outputs alone")

    name: ClassVar[str] = "int8"
    stage: ClassVar[Stage] = Stage.PRECISION
    summary: ClassVar[str] = "linear layers in int8: weights alone, or inputs too (dynamic or calibrated)"
    training: ClassVar[bool] = False
    excludes: ClassVar[frozenset[str]] = frozenset({"fp8", "onnxruntime", "tensorrt"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.percentile <= 100:
            raise RungError(f"int8: percentile is above 0 and at most 100, not {self.percentile}.")
        if self.mode != "static" and self.calibration != "minmax":
            raise RungError(f"int8: calibration={self.calibration} belongs to mode=static, not to mode={self.mode}.")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        if machine.why_slow("int8"):
            return (cls(),)
        return cls(), cls(mode="dynamic"), cls(mode="static", calibration="mse")

    def instead(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        if verdict != "refused" or self.progressive:
            return ()
        return ((replace(self, progressive=True),),)

    @property
    def judges(self) -> bool:
        return self.progressive

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        reason = why_no_torchao()
        if not reason and self.mode != "weight_only":
            reason = machine.why_slow("int8")
        if reason or job is None:
            return reason
        if not job.samples and (self.mode == "static" or self.progressive):
            need = "static mode calibrates" if self.mode == "static" else "progressive judges layers"
            return f"{need} on sample inputs, and none were given"
        otherwise = "" if machine.is_cuda else "; onnxruntime(int8=static) quantizes convolutions on a CPU"
        return why_no_layers(self._layers(job), job.model, otherwise)

    def resolve(self, job: Job) -> Rung:
        layers = self._layers(job)
        if job.device.type == "cuda" and self.mode != "weight_only" and job.samples:
            seen = observe(job, layers)
            layers = {
                name: layer for name, layer in layers.items() if name not in seen or seen[name].rows >= _CUDA_ROWS
            }
            if not layers:
                raise RungError(
                    f"int8: every layer sees fewer than {_CUDA_ROWS} rows, too few for int8 products on CUDA."
                )
        if self.progressive:
            quantize, layers = self._quantizer(job, layers)
            order = least_sensitive_first(job, layers, quantize)
            count = longest_passing(job, order, layers, quantize)
            if not count:
                raise RungError(
                    f"int8: with {order[0]!r} alone, the least sensitive of {len(order)} layers, a gate fails or has "
                    "less than a tenth of its limit left for other inputs."
                )
            layers = {name: layers[name] for name in order[:count]}
        left = [name for name in self._layers(job) if name not in layers]
        return replace(self, skip=(*self.skip, *left), progressive=False)

    def apply(self, job: Job) -> Job:
        found, before = len(linear_layers(job.model)), weights_before(job.model)
        quantize, layers = self._quantizer(job, self._layers(job))
        for name, layer in layers.items():
            quantize(name, layer)
            # Ours look at the new weight now: a compiler could not let them.
            if isinstance(layer, SwitchableModule):
                layer.pack(job.device)
        remarks = []
        if self.mode == "static":
            remarks.append(f"inputs calibrated by {self.calibration} on {len(job.samples)} batches")
        if len(layers) < found:
            remarks.append(f"{found - len(layers)} left alone (skipped, too small, or not seen on the samples)")
        job = job.with_evidence(self.name, Quantized("int8", self.mode, before, tuple(remarks)))
        precision = job.precision if self.mode == "weight_only" else "int8"
        return without_replaced(replace(job, precision=precision))

    def proof(self, job: Job) -> str:
        return job.evidence[self.name].proof(job.model)

    def _layers(self, job: Job) -> dict[str, nn.Linear]:
        layers = choose_layers(self.name, job.model, self.skip, self.min_features)
        if job.device.type != "cuda" or self.mode == "weight_only":
            return layers
        return {
            name: layer
            for name, layer in layers.items()
            if layer.in_features % _CUDA_MULTIPLE == 0 and layer.out_features % _CUDA_MULTIPLE == 0
        }

    def _quantizer(self, job: Job, layers: dict[str, nn.Linear]) -> tuple[Quantize, dict[str, nn.Linear]]:
        """What turns one layer into int8, and the layers that it can be used on."""
        ao = torchao_quantization()
        # A library must not change the compiler's global settings: that would leak into other trials.
        common: dict[str, Any] = {"set_inductor_config": False}
        if self.mode == "weight_only":
            return lambda name, layer: quantize_layer(self.name, name, layer, ao.Int8WeightOnlyConfig(**common)), layers
        reduced = not products_are_exact(job.device)
        common["reduce_range"] = reduced
        if self.mode == "dynamic":
            config = ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerRow(), **common)
            return lambda name, layer: quantize_layer(self.name, name, layer, config), layers
        if not job.samples:
            raise RungError("int8: static mode calibrates on sample inputs, and none were given.")
        limits = clipping_limits(job, layers, self.calibration, self.percentile)
        if not limits:
            raise RungError(
                "int8: no layer could be calibrated: none of them ran on the samples with inputs above zero."
            )

        def static(name: str, layer: nn.Linear) -> None:
            limit, rank = limits[name]
            scale = torch.full((1,) * rank, limit / (63 if reduced else 127), device=layer.weight.device)
            granularity = [ao.PerTensor(), ao.PerRow()]
            config = ao.Int8StaticActivationInt8WeightConfig(act_quant_scale=scale, granularity=granularity, **common)
            quantize_layer(self.name, name, layer, config)

        return static, {name: layer for name, layer in layers.items() if name in limits}


@cache
def products_are_exact(device: torch.device) -> bool:
    """Whether int8 products keep every bit; some CPUs saturate in 16 bits, and then need a smaller range."""
    if device.type != "cpu":
        return True
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 2, (64, 64), generator=generator).mul(255).sub(128).to(torch.int8) for _ in range(2))
    return torch.equal(torch._int_mm(a, b).long(), a.long() @ b.long())
