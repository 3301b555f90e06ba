"""fp16: converts the weights and activations of the model to float16, after an overflow check.

float16 has more mantissa bits than bfloat16, but its largest value is 65,504: a larger activation becomes infinite and
leads to NaN in the output. The rung therefore first runs a converted copy on the sample inputs. Every module whose
output is finite in fp32 must be finite in fp16. Otherwise the rung falls back to `bf16` with a warning that names the
module, and the saved plan contains `bf16`.
"""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.gate import all_finite, tensors_of
from redline.ladder.job import Job
from redline.ladder.rewrites.sample_run import watch_outputs
from redline.ladder.rung import Rung, option
from redline.ladder.rungs.bf16 import Bf16, HalfPrecision, convert
from redline.ladder.rungs.fp32_attention import Fp32Attention
from redline.ladder.rungs.grad_scaler import GradScaler
from redline.ladder.workload import Inputs, call
from redline.machine.trees import tree_map_only

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Fp16(HalfPrecision):
    name = "fp16"
    dtype = torch.float16
    summary = "weights and activations in float16, converted once; falls back to bf16 if the samples overflow"
    excludes = frozenset({"bf16", "autocast"})

    check: bool = option(True, "run the samples in fp16 first and fall back to bf16 if a value overflows")

    def fallbacks(self, verdict: str, training: bool) -> tuple[tuple[Rung, ...], ...]:
        if verdict != "refused":
            return ()
        return ((self, GradScaler()),) if training else ((self, Fp32Attention()),)

    def resolve(self, job: Job) -> Rung:
        if not self.check:
            return self
        if not job.samples:
            raise RungError("fp16: the overflow check needs real inputs: pass samples=, or use fp16(check=false).")
        overflow = find_overflow(job.model, job.samples, job.device)
        if not overflow:
            return self
        warnings.warn(f"fp16 falls back to bf16: {overflow}", stacklevel=2)
        return Bf16()

    def proof(self, job: Job) -> str:
        sentence = super().proof(job)
        checked = f"nothing overflowed on {len(job.samples)} sample(s)" if self.check else "overflow not checked"
        return f"{sentence}; {checked}" if sentence else ""


def find_overflow(model: nn.Module, samples: tuple[Inputs, ...], device: torch.device) -> str:
    """Returns a sentence naming the first weight, input or module that overflows in fp16; empty if none does."""
    for name, weight in model.named_parameters():
        if _leaves_range(weight):
            return f"the weight {name!r} exceeds {LARGEST:,.0f}"
    for index, sample in enumerate(samples):
        if any(map(_leaves_range, tensors_of(sample))):
            return f"an input of sample {index} exceeds {LARGEST:,.0f}"
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        # Runs copies, because a forward pass in training mode updates the statistics of BatchNorm. The fp32 copy shares
        # its weights with the model, because a forward pass does not change them and copies of them are large.
        scratch = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        infinite_in_fp32 = [_run_and_collect(scratch, _prepare(s, device, torch.float32)) for s in samples]
        halved = copy.deepcopy(model, {id(weight): _in_half(weight) for weight in model.parameters()})
        scratch = convert(halved, torch.float16)
        for index, sample in enumerate(samples):
            for name in _run_and_collect(scratch, _prepare(sample, device, torch.float16)):
                if name not in infinite_in_fp32[index]:
                    place = f"the output of {name!r}" if name else "the model's output"
                    return f"{place} is not finite in fp16 on sample {index}"
    return ""


def _in_half(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.to(torch.float16), weight.requires_grad) if weight.is_floating_point() else weight


def _leaves_range(tensor: Tensor) -> bool:
    """Returns whether a finite element becomes infinite in fp16."""
    if not tensor.is_floating_point():
        return False
    return bool((torch.isfinite(tensor) & ~torch.isfinite(tensor.to(torch.float16))).any())


def _prepare(sample: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Moves the sample to the device; for fp16 also converts its floating-point tensors."""
    half = dtype == torch.float16
    return tree_map_only(Tensor, lambda t: t.to(device, dtype if half and t.is_floating_point() else None), sample)


def _run_and_collect(model: nn.Module, sample: Inputs) -> list[str]:
    """Runs the model and returns the modules with a non-finite output, innermost and earliest first."""
    found: dict[str, None] = {}

    def note(name: str, output: Any) -> None:
        if not all_finite(output):
            found.setdefault(name)

    with watch_outputs(dict(model.named_modules()), note):
        call(model, sample)
    return list(found)
