"""cuda_graph: every kernel of a call is recorded once, and from then on launched together.

Small batches leave a GPU idle between kernels, because launching one takes the CPU longer than running it. A
recorded graph is launched by one command. It reads and writes fixed memory: inputs are copied into static
buffers, the graph is replayed, outputs are copied out (`clone`), so a result may be kept, or fed back as the
next input. Each form of input (shapes, dtypes, other values) gets its own graph; all of them share one pool
of memory, because only one runs at a time.

For training the whole step is recorded, the optimizer too. The first call of a form is a real step without a
graph; the rehearsals that a recording needs are undone; from the second call on the graph is replayed. So a
run gives the same losses as without graphs, step by step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from redline.cuda_graphs import CaptureCounts, CudaGraphCapturer, GraphCapturer, GraphedCallable, TrainingState
from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.ladder.rungs.compile import Compile
from redline.ladder.workload import OptimizerFactory
from redline.machine.machine import Machine
from redline.notation import format_bytes


@dataclass(frozen=True)
class CudaGraph(Rung):
    name: ClassVar[str] = "cuda_graph"
    stage: ClassVar[Stage] = Stage.LAUNCH
    summary: ClassVar[str] = "all kernels of a call recorded once and launched together"
    excludes: ClassVar[frozenset[str]] = frozenset({"onnxruntime"})

    clone: bool = option(
        True, "copy outputs out of the graph's memory; false hands out memory the next call overwrites"
    )
    limit: int = option(8, "how many forms of input get a graph of their own; others run without")
    rehearsals: int = option(3, "calls made before recording, so that nothing is set up while it records")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit < 1 or self.rehearsals < 1:
            raise RungError("cuda_graph: limit and rehearsals are 1 or more.")

    def beside(self, other: Rung) -> Rung | None:
        """torch.compile's modes with graphs of their own become the same modes without."""
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
            return "inputs start in host memory, and a graph replays copies from fixed places only (see streams)"
        if job.scaler is not None:
            return "the loss scaler decides on the CPU whether a step counts, which a graph cannot"
        if getattr(job.evidence.get("compile"), "uses_cuda_graphs", False):
            return "compile records CUDA graphs of its own in this mode: give it one without, such as default"
        return ""

    def apply(self, job: Job) -> Job:
        tally = CaptureCounts()
        optimizers: list[torch.optim.Optimizer] = []
        wrap = functools.partial(
            self._wrap, tally=tally, optimizers=optimizers, model=job.model, recorder=_recorder(job.device)
        )
        if job.optimizer is not None:
            job = replace(job, optimizer=functools.partial(_capturable, job.optimizer, optimizers))
        return replace(job, wrappers=(*job.wrappers, wrap)).with_evidence(self.name, tally)

    def _wrap(
        self,
        function: Callable[..., Any],
        tally: CaptureCounts,
        optimizers: list[torch.optim.Optimizer],
        model: nn.Module,
        recorder: GraphCapturer,
    ) -> GraphedCallable:
        tally.capturers[:] = [recorder]
        # The step's optimizer was made just before its wrappers.
        state = TrainingState(model, optimizers[-1]) if optimizers else None
        return GraphedCallable(
            function,
            recorder,
            tally,
            clone=self.clone,
            limit=self.limit,
            warmup_calls=self.rehearsals,
            state=state,
        )

    def proof(self, job: Job) -> str:
        tally: CaptureCounts = job.evidence[self.name]
        if not tally.replays:
            return ""
        held = format_bytes(sum(recorder.pool_bytes() for recorder in tally.capturers))
        graphs = f"{tally.graphs} graph{'s' if tally.graphs > 1 else ''}"
        said = f"{graphs} recorded, {tally.replays} replays, {held} in the pool"
        return said + (f", {tally.uncaptured} calls without a graph" if tally.uncaptured else "")


def _recorder(device: torch.device) -> GraphCapturer:
    return CudaGraphCapturer(device)


def _capturable(make: OptimizerFactory, made: list[torch.optim.Optimizer], parameters: Any) -> torch.optim.Optimizer:
    """Makes the optimizer keep its counters and learning rate on the GPU, where a graph can follow them."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            # A scheduler changes the tensor's value, which the graph reads: nothing is recorded again.
            adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
            if adam and not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    made[:] = [optimizer]
    return optimizer
