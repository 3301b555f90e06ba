"""streams: copies to and from the GPU that overlap with its work, for inputs that start in host memory.

Copying a batch in, computing, and copying the result out are done by three different parts of a GPU, yet
plain code makes each wait for the others, and from ordinary memory the driver copies twice. Here a batch is
cut into chunks: while one is computed the next is on its way in through pinned memory and the last on its way
out, each on a stream of its own. A call still returns a finished result in host memory, in memory of its own.

Cutting a batch is right only where rows do not look at each other; the rung checks that on the samples.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redline.errors import RungError
from redline.ladder.gate import all_finite, mismatch, tensors_of
from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.ladder.workload import call
from redline.machine.machine import Machine


class PlainCopies:
    """Copies one after the other: what a device without streams does, and what chunks are checked with."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def bring_in(self, index: int, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(self.device) for tensor in tensors]

    def computed(self, index: int) -> None:
        pass

    def bring_out(self, index: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            target.copy_(source)

    def new_output(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def wait(self) -> None:
        pass


class OverlappedCopies(PlainCopies):
    """A ring of `depth` pinned buffers with their twins on the GPU, and a stream for each direction.

    A slot is filled again only when the copy out of its host half, and the work on its device half, are done.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        super().__init__(device)
        self.depth = depth
        with torch.cuda.device(device):
            self.inward, self.outward = torch.cuda.Stream(), torch.cuda.Stream()
            self.copied = [torch.cuda.Event() for _ in range(depth)]
            self.used = [torch.cuda.Event() for _ in range(depth)]
            self.last = torch.cuda.Event()
        self.pinned: list[dict[int, Tensor]] = [{} for _ in range(depth)]
        self.twins: list[dict[int, Tensor]] = [{} for _ in range(depth)]

    def bring_in(self, index: int, tensors: list[Tensor]) -> list[Tensor]:
        slot = index % self.depth
        current = torch.cuda.current_stream(self.device)
        self.copied[slot].synchronize()
        sources = []
        for place, tensor in enumerate(tensors):
            if tensor.is_pinned():
                sources.append(tensor)
                continue
            staged = self._slice(self.pinned[slot], place, tensor, pinned=True)
            staged.copy_(tensor)
            sources.append(staged)
        arrived = []
        with torch.cuda.stream(self.inward):
            self.inward.wait_event(self.used[slot])
            for place, source in enumerate(sources):
                twin = self._slice(self.twins[slot], place, source, pinned=False)
                twin.copy_(source, non_blocking=True)
                arrived.append(twin)
            self.copied[slot].record(self.inward)
        current.wait_event(self.copied[slot])
        return arrived

    def computed(self, index: int) -> None:
        self.used[index % self.depth].record(torch.cuda.current_stream(self.device))

    def bring_out(self, index: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                # Its memory must not be given to the next chunk while it is still being read.
                source.record_stream(self.outward)
            self.last.record(self.outward)

    def new_output(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def wait(self) -> None:
        self.last.synchronize()

    def _slice(self, buffers: dict[int, Tensor], place: int, like: Tensor, pinned: bool) -> Tensor:
        """The first rows of a buffer that is made once, and made again when it is too small."""
        buffer = buffers.get(place)
        fits = buffer is not None and buffer.dtype == like.dtype and buffer.shape[1:] == like.shape[1:]
        if buffer is None or not fits or buffer.shape[:1] < like.shape[:1]:
            if not pinned:
                # The old twin may still be read by work in flight.
                torch.cuda.synchronize(self.device)
            device = torch.device("cpu") if pinned else self.device
            buffer = torch.empty(like.shape, dtype=like.dtype, device=device, pin_memory=pinned)
            buffers[place] = buffer
        return buffer[: like.shape[0]] if like.ndim else buffer


class Pipeline:
    """Called with inputs in host memory; gives outputs in host memory."""

    def __init__(self, function: Callable[..., Any], copies: PlainCopies, chunks: int, tally: dict[str, int]) -> None:
        self.function = function
        self.copies = copies
        self.chunks = chunks
        self.tally = tally

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results: list[Any] = []
        shape = None
        pieces = list(_pieces([leaves[i] for i in places], self.chunks))
        rows = sum(count for count, _ in pieces)
        start = 0
        for index, (count, tensors) in enumerate(pieces):
            for place, tensor in zip(places, self.copies.bring_in(index, tensors), strict=True):
                leaves[place] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(leaves, structure)
            output, shape = pytree.tree_flatten(self.function(*own_args, **own_kwargs))
            self.copies.computed(index)
            if index == 0:
                results = [self._room(leaf, count, rows, len(pieces)) for leaf in output]
            pairs = []
            for source, target in zip(output, results, strict=True):
                if isinstance(source, Tensor):
                    pairs.append((source, target[start : start + count] if len(pieces) > 1 else target))
            self.copies.bring_out(index, pairs)
            start += count
        self.copies.wait()
        self.tally["calls"] = self.tally.get("calls", 0) + 1
        self.tally["chunks"] = self.tally.get("chunks", 0) + len(pieces)
        assert shape is not None
        return pytree.tree_unflatten(results, shape)

    def _room(self, leaf: Any, count: int, rows: int, pieces: int) -> Any:
        """Host memory for the whole of an output, of which the first chunk is here."""
        if not isinstance(leaf, Tensor):
            return leaf
        if pieces == 1:
            return self.copies.new_output(list(leaf.shape), leaf.dtype)
        if not leaf.ndim or leaf.shape[0] != count:
            raise RungError(f"streams: an output of shape {tuple(leaf.shape)} has no row per input row: use chunks=1.")
        return self.copies.new_output([rows, *leaf.shape[1:]], leaf.dtype)


def _pieces(tensors: list[Tensor], chunks: int) -> Iterator[tuple[int, list[Tensor]]]:
    """The inputs in nearly equal cuts along the first axis; whole where they do not share it."""
    rows = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors}
    count = rows.pop() if len(rows) == 1 else -1
    if count < chunks or chunks == 1:
        yield max(count, 0), tensors
        return
    for parts in zip(*(tensor.tensor_split(chunks) for tensor in tensors), strict=True):
        yield parts[0].shape[0], list(parts)


@dataclass(frozen=True)
class Streams(Rung):
    name: ClassVar[str] = "streams"
    stage: ClassVar[Stage] = Stage.LAUNCH
    summary: ClassVar[str] = "copies in and out that overlap with the work, through pinned memory"
    training: ClassVar[bool] = False
    excludes: ClassVar[frozenset[str]] = frozenset({"cuda_graph"})

    chunks: int = option(4, "how many pieces a batch is cut into")
    depth: int = option(2, "how many pieces may be on their way at once")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1 or self.depth < 1:
            raise RungError("streams: chunks and depth are 1 or more.")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> "tuple[Rung, ...]":
        return tuple(cls(chunks=chunks) for chunks in (2, 4, 8))

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if not machine.is_cuda:
            return "it needs a CUDA GPU: on a CPU there is nothing to copy"
        if job is not None and not job.host_inputs:
            return "the inputs are on the GPU already (a workload with host_inputs=True has copies to overlap)"
        return ""

    def apply(self, job: Job) -> Job:
        tally: dict[str, int] = {}
        if self.chunks > 1:
            self._check(job)
        wrap = functools.partial(self._wrap, device=job.device, tally=tally)
        return replace(job, wrappers=(*job.wrappers, wrap), host_inputs=False).with_evidence(self.name, tally)

    def _wrap(self, function: Callable[..., Any], device: torch.device, tally: dict[str, int]) -> Pipeline:
        copies = OverlappedCopies(device, self.depth) if device.type == "cuda" else PlainCopies(device)
        return Pipeline(function, copies, self.chunks, tally)

    def _check(self, job: Job) -> None:
        """Whole batches and cut ones must give the same, on every sample."""
        wrap = functools.partial(Pipeline, copies=PlainCopies(job.device), chunks=self.chunks, tally={})
        # Compilers are left out of it: what is asked is whether rows look at each other.
        with torch.compiler.set_stance("force_eager"):
            for sample in job.samples:
                whole = call(job.finish(), sample)
                try:
                    cut = call(replace(job, wrappers=(*job.wrappers, wrap), host_inputs=False).finish(), sample)
                except RungError:
                    raise
                except Exception as error:
                    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    raise RungError(f"streams: the model does not take a cut batch ({text}): use chunks=1.") from error
                problem = mismatch(tensors_of(whole), tensors_of(cut))
                if problem:
                    problem = problem.rstrip(".")
                    raise RungError(f"streams: cutting the batch changes the output ({problem}): use chunks=1.")
                scores = [gate.judge(whole, cut) for gate in job.gates]
                red = [score for score in scores if not score.passed]
                if red or not all_finite(cut):
                    reason = str(red[0]) if red else "not finite"
                    raise RungError(f"streams: cutting the batch changes the output ({reason}): use chunks=1.")

    def proof(self, job: Job) -> str:
        tally = job.evidence[self.name]
        if not tally.get("calls"):
            return ""
        each = tally["chunks"] / tally["calls"]
        return f"{tally['calls']} calls copied in and out on streams of their own, in {each:.3g} chunks each"
