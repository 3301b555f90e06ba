"""cuda_graph: captures all kernels of a call in a CUDA graph and replays the graph at later calls.

With small batches a GPU idles between kernels, because launching a kernel takes the CPU longer than the GPU needs to
run it. A captured graph is launched by one call. It reads and writes fixed addresses: inputs are copied into static
buffers, the graph is replayed, and outputs are copied out (`clone`), so that a result stays valid and can be used as
the next input. Each combination of input shapes, dtypes and non-tensor values gets its own graph; all graphs share one
memory pool, because only one runs at a time.

For training the rung captures the whole step including the optimizer. The first call with a combination is a regular
step; the warm-up steps that a capture needs are rolled back; from the second call on the graph is replayed. The losses
are the same as without graphs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.ladder.job import Job
from redline.ladder.rung import Rung, ShapeCounts, Stage, option
from redline.ladder.rungs.compile import Compile
from redline.ladder.workload import OptimizerFactory
from redline.machine.cuda_graphs import CaptureCounts, CudaGraphCapturer, GraphedCallable, TrainingState
from redline.machine.machine import Machine
from redline.notation import format_bytes


@dataclass(frozen=True)
class CudaGraph(Rung):
    name = "cuda_graph"
    stage = Stage.LAUNCH
    summary = "all kernels of a call captured once and replayed as one CUDA graph"
    excludes = frozenset({"onnxruntime"})

    clone: bool = option(True, "copy outputs out of the graph's memory; with false the next call overwrites them")
    limit: int = option(
        8, "maximum number of graphs (one per combination of input shapes); other shapes run eagerly", at_least=1
    )
    rehearsals: int = option(3, "warm-up calls before the capture", at_least=1)

    def adjust_other(self, other: Rung) -> Rung | None:
        """Replaces torch.compile modes that use CUDA graphs by the same modes without them."""
        if isinstance(other, Compile) and other.uses_cuda_graphs:
            plain = "default" if other.mode == "reduce-overhead" else "max-autotune-no-cudagraphs"
            return replace(other, mode=plain)
        return other

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return "it needs a CUDA GPU"
        if job is None:
            return ""
        if job.host_inputs:
            return "inputs start in host memory, and a graph can copy only from fixed addresses (use streams)"
        if job.scaler is not None:
            return "grad_scaler decides on the CPU whether to skip a step, which a graph cannot do"
        if getattr(job.evidence.get("compile"), "uses_cuda_graphs", False):
            return "compile captures CUDA graphs itself in this mode: use a mode without CUDA graphs, such as default"
        return ""

    def apply(self, job: Job) -> Job:
        tally, recorder, model = CaptureCounts(), CudaGraphCapturer(job.device), job.model
        optimizers: list[torch.optim.Optimizer] = []

        def wrap(function: Callable[..., Any]) -> GraphedCallable:
            tally.capturers[:] = [recorder]
            # Each step's optimizer is created just before the step is wrapped, so the last one belongs to this step.
            state = TrainingState(model, optimizers[-1]) if optimizers else None
            settings: dict[str, Any] = {"clone": self.clone, "limit": self.limit, "warmup_calls": self.rehearsals}
            return GraphedCallable(function, recorder, tally, **settings, state=state)

        if job.optimizer is not None:
            job = replace(job, optimizer=functools.partial(_capturable, job.optimizer, optimizers))
        return replace(job, wrappers=(*job.wrappers, wrap)).with_evidence(self.name, tally)

    def proof(self, job: Job) -> str:
        tally: CaptureCounts = job.evidence[self.name]
        if not tally.replays:
            return ""
        held = format_bytes(sum(recorder.pool_bytes() for recorder in tally.capturers))
        plural = "s" if tally.graphs > 1 else ""
        said = f"{tally.graphs} graph{plural} captured, {tally.replays} replays, {held} in the pool"
        return said + (f", {tally.uncaptured} calls without a graph" if tally.uncaptured else "")

    def shape_counts(self, job: Job) -> ShapeCounts:
        tally: CaptureCounts = job.evidence[self.name]
        reason = f"only {self.limit} graphs are captured (limit={self.limit})" if tally.uncaptured else ""
        return ShapeCounts(tally.graphs, tally.uncaptured, reason)


def _capturable(make: OptimizerFactory, made: list[torch.optim.Optimizer], parameters: Any) -> torch.optim.Optimizer:
    """Makes the optimizer keep its step counters and learning rate on the GPU, where a graph reads them."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            # The graph reads the tensor, so a scheduler can change its value without a new capture.
            adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
            if adam and not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    made[:] = [optimizer]
    return optimizer
