"""compile: torch.compile, with every option that changes what it makes written in the plan.

The compiler fuses chains of small operations into kernels of their own and drops Python from between them. It
pays with time at the first call (and again for new shapes), which measurements show beside the speed.
`regional` compiles the repeated blocks of a model instead of the whole: nearly the same kernels after a
fraction of the wait, because blocks of one class share the compiled code.

Modes with CUDA graphs hand out memory that the next call overwrites. Here outputs are copied out of it, so
that a result stays what it was and may be fed back as an input; the measurement includes the copy.
"""

import functools
import importlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.ladder.job import Job
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rewrites.per_shape import input_form
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.quiet import quiet

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Fewer repeats than this are not what a model is made of.
_LEAST_REPEATS = 3
# How often torch may compile the same code again before it gives up and runs it uncompiled.
_COMPILATIONS_PER_REGION = 8


@dataclass(frozen=True)
class Compiled:
    """What the rung leaves: for its proof, and for rungs that must know whether CUDA graphs are inside."""

    uses_cuda_graphs: bool
    regions: int
    graphs_before: int
    breaks_before: Counter[str]


@dataclass(frozen=True)
class Compile(Rung):
    name: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE
    summary: ClassVar[str] = "torch.compile: fused kernels, less Python between them"
    excludes: ClassVar[frozenset[str]] = frozenset({"onnxruntime", "tensorrt"})

    mode: str = option("default", "torch.compile's mode", MODES)
    fullgraph: bool = option(False, "refuse graph breaks instead of running around them")
    dynamic: str = option("auto", "kernels for any size (true), for the first size (false)", ("auto", "true", "false"))
    regional: bool = option(False, "compile the repeated blocks instead of the whole model")
    freeze: bool = option(False, "take weights as constants, to fold and re-order them (inference)")
    coordinate_descent: bool = option(False, "tune each kernel's block sizes by trial (slow to compile)")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> "tuple[Rung, ...]":
        if not machine.is_cuda:
            return (cls(),) if training else (cls(), cls(freeze=True))
        if training:
            return cls(), cls(mode="reduce-overhead"), cls(mode="max-autotune")
        graphs = cls(mode="reduce-overhead")
        return graphs, replace(graphs, freeze=True), cls(mode="max-autotune", freeze=True)

    def instead(self, verdict: str, training: bool) -> "tuple[tuple[Rung, ...], ...]":
        """A whole that takes too long, or breaks the compiler, may compile block by block.

        Not where kernels are searched for: the search takes as long for the blocks.
        """
        broke = verdict in ("failed", "unmeasured")
        return ((replace(self, regional=True),),) if broke and not (self.regional or self.searches) else ()

    @property
    def searches(self) -> bool:
        return self.mode == "max-autotune"

    @property
    def uses_cuda_graphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            return "TORCH_COMPILE_DISABLE=1 in the environment switches it off"
        if machine.is_cuda:
            if not machine.has("triton"):
                return "it makes its GPU kernels with Triton, which is not installed: pip install triton"
        elif not _cpp_compiler():
            return "its CPU kernels need a C++ compiler, and there is none: install g++ or clang++, or set CXX"
        elif self.mode == "reduce-overhead":
            return "mode=reduce-overhead records CUDA graphs, and this is a CPU"
        if job is not None and job.training and self.freeze:
            return "freeze=true takes weights as constants, and training changes them"
        if job is not None and self.regional and not _repeated_blocks(job.model):
            return f"regional=true saves compiling blocks that repeat, and none is in a list {_LEAST_REPEATS} times"
        return ""

    def apply(self, job: Job) -> Job:
        cuda = job.device.type == "cuda"
        with quiet():
            compiler = importlib.import_module("torch._inductor.compile_fx")  # its imports warn about themselves
            if cuda:
                # Its advice comes once in a process: what fp32 products are rounded to is a rung of its own.
                getattr(compiler, "_warn_tf32_disabled", bool)()
        if type(job.model).__module__.startswith("torch."):
            # Dynamo does not look into torch's own modules when they are the root: it would compile nothing.
            job = replace(job, model=Boundary(job.model))
        regions = _repeated_blocks(job.model) if self.regional else [job.model]
        for region in regions:
            region.compile(
                fullgraph=self.fullgraph,
                dynamic={"auto": None, "true": True, "false": False}[self.dynamic],
                options=self._options(cuda),
            )
        evidence = Compiled(cuda and self.uses_cuda_graphs, len(regions), _graphs(), _breaks())
        wrappers, contexts = job.wrappers, job.contexts
        if self.regional and job.training:
            # Around whole steps: blocks also compile for gradients, and for the evaluation between steps, whose inputs
            # are of a known form while the gradient mode is another.
            contexts = (*contexts, functools.partial(_room_to_recompile, len(regions)))
        elif self.freeze or self.regional:
            wrappers = (
                *wrappers,
                functools.partial(_while_compiling, freeze=self.freeze, regions=len(regions)),
            )
        if evidence.uses_cuda_graphs:
            wrappers = (*wrappers, _owning_outputs)
        return replace(job, wrappers=wrappers, contexts=contexts).with_evidence(self.name, evidence)

    def _options(self, cuda: bool) -> dict[str, Any]:
        # torch.compile takes a mode or options, not both; a mode is nothing but a set of options.
        options = dict(torch._inductor.list_mode_options(self.mode))
        if not cuda:
            options.pop("triton.cudagraphs", None)
        if self.coordinate_descent:
            options["coordinate_descent_tuning"] = True
        if self.freeze:
            options["freezing"] = True
        return options

    def proof(self, job: Job) -> str:
        evidence: Compiled = job.evidence[self.name]
        graphs = _graphs() - evidence.graphs_before
        if graphs <= 0:
            return ""
        breaks = _breaks() - evidence.breaks_before
        count = sum(breaks.values())
        said = "no graph break"
        if count:
            reason = breaks.most_common(1)[0][0].strip().splitlines()[0]
            said = f"{count} graph break{'s' if count > 1 else ''} (most often: {reason})"
        where = f" for {evidence.regions} blocks" if self.regional else ""
        return f"{graphs} graph{'s' if graphs > 1 else ''} compiled{where}, {said}"


def _cpp_compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), None)


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _breaks() -> Counter[str]:
    return Counter(torch._dynamo.utils.counters["graph_break"])


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every list of modules in which one class, with modules inside, comes often."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or container in inside:
            continue
        children = [c for c in container if c not in inside and any(True for _ in c.children())]
        repeats = Counter(type(child) for child in children)
        for child in children:
            if repeats[type(child)] >= _LEAST_REPEATS:
                found.append(child)
                inside.update(child.modules())
    return found


@contextmanager
def _room_to_recompile(regions: int) -> Iterator[None]:
    # Imported late: the compiler is large, and most plans are read without it.
    from torch._dynamo import config as tracer

    # Set and restored by hand, because `patch` takes ten times as long, and this is entered at every training step.
    before = tracer.recompile_limit
    tracer.recompile_limit = max(before, regions * _COMPILATIONS_PER_REGION)
    try:
        yield
    finally:
        tracer.recompile_limit = before


@contextmanager
def _compiler_settings(freeze: bool, regions: int) -> Iterator[None]:
    from torch._inductor import config as inductor

    with ExitStack() as stack:
        if freeze:
            # The tracer reads this too, before the options of torch.compile are looked at.
            stack.enter_context(inductor.patch(freezing=True))
        stack.enter_context(_room_to_recompile(regions))
        yield


def _while_compiling(function: Callable[..., Any], freeze: bool, regions: int) -> Callable[..., Any]:
    """Changes the compiler's settings during calls of a form not seen before: only those can compile."""
    seen: set[Any] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        form = input_form(args, kwargs)
        if form in seen:
            return function(*args, **kwargs)
        with _compiler_settings(freeze, regions):
            output = function(*args, **kwargs)
        seen.add(form)
        return output

    return run


def _owning_outputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copies outputs out of the memory that the next replay writes to."""

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_cuda else leaf

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        output = function(*args, **kwargs)
        return own(output) if isinstance(output, Tensor) else pytree.tree_map(own, output)

    return run
