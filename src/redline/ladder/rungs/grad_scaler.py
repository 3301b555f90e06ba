"""grad_scaler: scales the loss before the backward pass, so that small fp16 gradients do not underflow to zero.

The range of fp16 is about 6e-8 to 65,504. The loss is multiplied by a scale, and the gradients are divided by it before
the optimizer step. If a gradient overflows, the step is skipped and the scale decreases; after `growth_interval` steps
without overflow it increases. After `switch_after` overflows in a row, the model is converted to bf16 with a warning
and training continues without a scale.

torch's GradScaler rejects fp16 gradients, which a model converted to fp16 has; this scaler accepts them. The divided
gradients are fp16 again, so in this case the scale protects only the backward pass. Under `autocast(dtype=fp16)`, where
weights and gradients are fp32, the scale protects the gradients as well.
"""

import warnings
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine

# With a larger scale, a large loss would overflow fp32.
_LARGEST_SCALE = 2.0**32


class AdaptiveGradScaler:
    """Scales a loss like `torch.amp.GradScaler`: `scale(loss).backward()`, `step(optimizer)`, `update()`."""

    def __init__(self, model: nn.Module, options: "GradScaler | None" = None) -> None:
        self.model = model
        self.options = options or GradScaler()
        self.current = self.options.init_scale
        self.steps = self.skipped = 0
        self.switched = self._overflowed = False
        self._overflows_in_a_row = self._clean_in_a_row = 0
        # For each optimizer between `unscale_` and `step`: whether its gradients overflowed.
        self._unscaled: dict[Optimizer, bool] = {}
        self._optimizers: list[Optimizer] = []

    def scale(self, loss: Tensor) -> Tensor:
        # Converts the loss to fp32, because a scaled fp16 loss would overflow.
        return loss if self.switched else loss.float() * self.current

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, so that they can be clipped before `step`."""
        if optimizer not in self._unscaled:
            self._unscaled[optimizer] = not self.switched and self._unscale(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale and runs the optimizer step unless a gradient is not finite."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self.steps += 1
        self.unscale_(optimizer)
        self._overflowed = self._unscaled.pop(optimizer)
        if self._overflowed:
            self.skipped += 1
        else:
            optimizer.step()

    def update(self) -> None:
        """Adjusts the scale after a step."""
        if self.switched:
            return
        if not self._overflowed:
            self._overflows_in_a_row = 0
            self._clean_in_a_row += 1
            if self._clean_in_a_row == self.options.growth_interval:
                self.current = min(self.current * self.options.growth_factor, _LARGEST_SCALE)
                self._clean_in_a_row = 0
            return
        self._clean_in_a_row = 0
        self._overflows_in_a_row += 1
        self.current *= self.options.backoff
        if self._overflows_in_a_row == self.options.switch_after:
            self._switch_to_bf16()

    def _unscale(self, optimizer: Optimizer) -> bool:
        """Divides every gradient in place; returns whether one of them is infinite or NaN."""
        grouped: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            grouped[values.device, values.dtype].append(values)
        flags = []
        for (device, _), gradients in grouped.items():
            flag = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1 / self.current, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)
            flags.append(flag)
        return any(bool(flag.item()) for flag in flags)

    def _switch_to_bf16(self) -> None:
        self.switched = True
        warnings.warn(
            f"grad_scaler: {self.options.switch_after} steps in a row overflowed fp16, the last with a scale of "
            f"{self.current:g}; the model is converted to bf16, and training continues without loss scaling.",
            stacklevel=4,
        )
        with torch.no_grad():
            self.model._apply(_fp16_to_bf16)
        for module in self.model.modules():
            # Also changes the dtype to which `Boundary` and `Autocasting` modules convert.
            if vars(module).get("dtype") is torch.float16:
                vars(module)["dtype"] = torch.bfloat16
        for parameter in self.model.parameters():
            parameter.grad = None
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                state.update({k: _fp16_to_bf16(v) for k, v in state.items() if isinstance(v, Tensor)})


def _fp16_to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype is torch.float16 else tensor


@dataclass(frozen=True)
class GradScaler(Rung):
    name = "grad_scaler"
    stage = Stage.PRECISION
    summary = "adaptive loss scaling for fp16; switches to bf16 after repeated overflows"
    inference = False
    # Each step reads from the device whether the gradients are finite, which a CUDA graph cannot do.
    excludes = frozenset({"cuda_graph"})

    init_scale: float = option(4096.0, "initial scale of the loss", above=0)
    growth_factor: float = option(2.0, "factor of the scale after growth_interval steps without overflow", at_least=1)
    growth_interval: int = option(2000, "number of steps without overflow before the scale grows", at_least=1)
    backoff: float = option(0.5, "factor of the scale after an overflow", above=0, below=1)
    switch_after: int = option(
        5, "number of overflows in a row before the switch to bf16; 0 disables the switch", at_least=0
    )

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None:
            return machine.why_slow("fp16")
        if job.precision != "fp16":
            return f"the model computes in {job.precision}, and only fp16 needs loss scaling"
        return ""

    def apply(self, job: Job) -> Job:
        made: list[AdaptiveGradScaler] = []

        def build(optimizer: Optimizer) -> AdaptiveGradScaler:
            made[:] = [AdaptiveGradScaler(job.model, self)]
            return made[0]

        return replace(job.with_evidence(self.name, made), scaler=build)

    def proof(self, job: Job) -> str:
        made: list[AdaptiveGradScaler] = job.evidence[self.name]
        if not made or not made[0].steps:
            return ""
        scaler = made[0]
        steps = f"loss scaled in {scaler.steps} steps, {scaler.skipped} skipped after an overflow"
        if scaler.switched:
            return f"{steps}; switched to bf16 after {self.switch_after} overflows in a row"
        return f"{steps}; scale {scaler.current:g}, initially {self.init_scale:g}"
