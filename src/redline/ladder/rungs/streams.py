"""streams: overlaps copies to and from the GPU with the computation, for inputs in host memory.

A GPU copies in, computes and copies out with three different engines, but in plain code each waits for the others, and
the driver copies pageable memory twice. This rung splits a batch into chunks: while one chunk is computed, the next one
is copied in through pinned memory and the previous one is copied out, each on its own stream. A call still returns
a complete result in newly allocated host memory.

Splitting a batch is valid only if rows do not depend on each other. The rung checks that on the samples.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.errors import RungError, first_line
from redline.ladder.gate import all_finite, gates_for, mismatch, values_of
from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.ladder.workload import call
from redline.machine.machine import Machine
from redline.machine.pinned_copies import CudaDevice, PendingCopy, PinnedCopies, PlainCopies
from redline.machine.trees import tree_flatten, tree_unflatten


@dataclass(eq=False)
class Pipeline:
    """Calls a function on inputs in host memory, chunk by chunk, and returns outputs in host memory."""

    function: Callable[..., Any]
    copies: PlainCopies
    chunks: int
    tally: dict[str, int]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results: list[Any] = []
        returned: list[PendingCopy] = []
        output_structure = None
        pieces = list(_pieces([leaves[i] for i in positions], self.chunks))
        rows = sum(count for count, _ in pieces)
        start = 0
        for index, (count, tensors) in enumerate(pieces):
            sent = [self.copies.to_device(tensor, ring) for ring, tensor in enumerate(tensors)]
            for position, copy in zip(positions, sent, strict=True):
                leaves[position] = copy.wait()
            own_args, own_kwargs = tree_unflatten(leaves, structure)
            output, output_structure = tree_flatten(self.function(*own_args, **own_kwargs))
            for copy in sent:
                copy.release()
            if index == 0:
                results = [self._empty_result(leaf, count, rows, len(pieces)) for leaf in output]
            for source, target in zip(output, results, strict=True):
                if isinstance(source, Tensor):
                    into = target[start : start + count] if len(pieces) > 1 else target
                    returned.append(self.copies.to_host(source, into))
            start += count
        for copy in returned:
            copy.wait()
        self.tally["calls"] = self.tally.get("calls", 0) + 1
        self.tally["chunks"] = self.tally.get("chunks", 0) + len(pieces)
        assert output_structure is not None
        return tree_unflatten(results, output_structure)

    def _empty_result(self, leaf: Any, count: int, rows: int, pieces: int) -> Any:
        """Allocates host memory for a whole output, given the output of the first chunk."""
        if not isinstance(leaf, Tensor):
            return leaf
        if pieces == 1:
            return self.copies.empty_host(leaf.shape, leaf.dtype)
        if not leaf.ndim or leaf.shape[0] != count:
            said = f"streams: an output of shape {tuple(leaf.shape)} does not have one row per input row"
            raise RungError(f"{said}; use chunks=1.")
        return self.copies.empty_host([rows, *leaf.shape[1:]], leaf.dtype)


def _pieces(tensors: list[Tensor], chunks: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields chunks of the inputs along dimension 0 with their row counts; a single chunk if no split is possible."""
    rows = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors}
    count = rows.pop() if len(rows) == 1 else -1
    if count < chunks or chunks == 1:
        yield max(count, 0), tensors
        return
    for parts in zip(*(tensor.tensor_split(chunks) for tensor in tensors), strict=True):
        yield parts[0].shape[0], list(parts)


@dataclass(frozen=True)
class Streams(Rung):
    name = "streams"
    stage = Stage.LAUNCH
    summary = "copies in and out that overlap with the computation, through pinned memory"
    training = False
    excludes = frozenset({"cuda_graph"})

    chunks: int = option(4, "how many chunks a batch is split into", at_least=1)
    depth: int = option(2, "how many chunks may be in flight at once", at_least=1)

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> "tuple[Rung, ...]":
        return tuple(cls(chunks=chunks) for chunks in (2, 4, 8))

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return "it needs a CUDA GPU: on a CPU there is nothing to copy"
        if job is not None and not job.host_inputs:
            return "the inputs are already on the GPU (a workload with host_inputs=True has copies to overlap)"
        return ""

    def apply(self, job: Job) -> Job:
        tally: dict[str, int] = {}
        if self.chunks > 1:
            self._check(job)
        device = job.device

        def wrap(function: Callable[..., Any]) -> Pipeline:
            copies = PlainCopies(device)
            if device.type == "cuda":
                copies = PinnedCopies.with_stream_per_direction(CudaDevice(device), self.depth)
            return Pipeline(function, copies, self.chunks, tally)

        return replace(job, wrappers=(*job.wrappers, wrap), host_inputs=False).with_evidence(self.name, tally)

    def _check(self, job: Job) -> None:
        """Raises `RungError` unless split batches give the same output as whole batches on every sample."""
        wrap = functools.partial(Pipeline, copies=PlainCopies(job.device), chunks=self.chunks, tally={})
        # Compilation is not necessary to see whether rows depend on each other.
        with torch.compiler.set_stance("force_eager"):
            for sample in job.samples:
                whole = call(job.finish(), sample)
                try:
                    split = call(replace(job, wrappers=(*job.wrappers, wrap), host_inputs=False).finish(), sample)
                except RungError:
                    raise
                except Exception as error:
                    sentence = f"streams: the model does not accept a split batch ({first_line(error)}); use chunks=1."
                    raise RungError(sentence) from error
                if problem := self._difference(job, whole, split):
                    raise RungError(f"streams: splitting the batch changes the output ({problem}); use chunks=1.")

    def _difference(self, job: Job, whole: Any, split: Any) -> str:
        if problem := mismatch(values_of(whole), values_of(split)):
            return problem.rstrip(".")
        failed = [score for gate in gates_for(job.gates, whole) if not (score := gate.judge(whole, split)).passed]
        return str(failed[0]) if failed else "" if all_finite(split) else "not finite"

    def proof(self, job: Job) -> str:
        tally = job.evidence[self.name]
        if not tally.get("calls"):
            return ""
        each = tally["chunks"] / tally["calls"]
        return f"{tally['calls']} calls copied in and out on separate streams, in {each:.3g} chunks each"
