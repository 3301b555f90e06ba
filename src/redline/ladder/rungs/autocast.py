"""autocast: runs the model under `torch.autocast`, which chooses the dtype of each operation.

The weights stay in fp32; each call casts weights and activations for the operations that have a fast low-precision
kernel. Sensitive operations such as softmax and sums stay in fp32, but the casts cost time and memory traffic that the
direct conversions `bf16` and `fp16` avoid. A climb measures the difference.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.ladder.job import Job
from redline.ladder.rewrites.sample_run import on_device, state_preserved, watch_outputs
from redline.ladder.rung import Rung, Stage, option
from redline.ladder.workload import Inputs, call
from redline.machine.machine import Machine
from redline.machine.trees import tree_map_only

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCTS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class Autocasting(nn.Module):
    """Calls the model under torch.autocast and returns fp32."""

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.device_type = device_type
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            output = self.model(*args, **kwargs)
        return tree_map_only(Tensor, lambda leaf: leaf.float() if leaf.dtype == self.dtype else leaf, output)


@dataclass(frozen=True)
class Autocast(Rung):
    name = "autocast"
    stage = Stage.PRECISION
    summary = "torch.autocast: fp32 weights, cast per operation at every call"
    excludes = frozenset({"bf16", "fp16"})

    dtype: str = option("bf16", "dtype of the operations that autocast runs in low precision", tuple(DTYPES))

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        """Returns the variant with the first dtype that is fast here: bf16, which does not overflow, or fp16."""
        return (next((cls(dtype) for dtype in DTYPES if not machine.why_slow(dtype)), cls()),)

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        slow = machine.why_slow(self.dtype, job.mostly if job is not None else "")
        if slow or job is None or any(isinstance(m, PRODUCTS) for m in job.model.modules()):
            return slow
        return "the model has no Linear or convolution layer to cast"

    def apply(self, job: Job) -> Job:
        wrapped = Autocasting(job.model, job.device.type, DTYPES[self.dtype])
        # Runs the hooks before compilation, because a hook inside a compiled call would break the graph.
        dtypes = _layer_dtypes(wrapped, job.samples[0], job.device) if job.samples else None
        return replace(job.with_evidence(self.name, dtypes), model=wrapped, precision=self.dtype)

    def proof(self, job: Job) -> str:
        dtypes: dict[str, torch.dtype] | None = job.evidence[self.name]
        if dtypes is None:
            layers = sum(isinstance(m, PRODUCTS) for m in job.model.modules())
            said = f"autocast to {self.dtype} around {layers} layers (not verified: no sample inputs)"
            return said if layers else ""
        low = sum(dtype == DTYPES[self.dtype] for dtype in dtypes.values())
        return f"{low} of {len(dtypes)} Linear and convolution layers ran in {self.dtype}" if low else ""


def _layer_dtypes(model: nn.Module, sample: Inputs, device: torch.device) -> dict[str, torch.dtype]:
    """Returns the output dtype of each layer in one forward pass that does not change the model."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PRODUCTS)}
    seen: dict[str, torch.dtype] = {}

    def note(name: str, output: Tensor) -> None:
        seen[name] = output.dtype

    with torch.no_grad(), state_preserved(model), watch_outputs(layers, note):
        call(model, on_device(sample, device))
    return seen
