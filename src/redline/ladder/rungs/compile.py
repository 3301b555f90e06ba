"""compile: compiles the model with torch.compile; the plan contains every option that affects the generated code.

The compiler fuses chains of small operations into single kernels and removes the Python overhead between them. The
first call, and the first call with each new shape, takes longer; measurements report this set-up time separately.
`regional` compiles the repeated blocks of a model instead of the whole model. The kernels are nearly the same, and the
compilation takes a fraction of the time, because blocks of one class share their compiled code.

In modes with CUDA graphs, torch.compile returns memory that the next call overwrites. This rung copies the outputs, so
that a result stays valid and can be passed back as an input; the measured time includes the copy.
"""

import functools
import importlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.ladder.job import Context, Job
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rewrites.per_shape import input_form
from redline.ladder.rung import Rung, ShapeCounts, Stage, option
from redline.machine.machine import Machine
from redline.machine.quiet import quiet
from redline.machine.trees import tree_map_only

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# `regional` compiles the blocks of a list only if at least this many of them have the same class.
_MIN_REPEATS = 3
# Raises torch's recompile limit to this many compilations per block, because torch runs code eagerly beyond the limit.
_COMPILATIONS_PER_REGION = 8


@dataclass(frozen=True)
class Compiled:
    """What the compiler did, as evidence for the proof; other rungs read `uses_cuda_graphs`."""

    uses_cuda_graphs: bool
    regions: int
    graphs_before: int
    breaks_before: Counter[str]


@dataclass(frozen=True)
class Compile(Rung):
    name = "compile"
    stage = Stage.COMPILE
    summary = "torch.compile: fused kernels and less Python overhead"
    excludes = frozenset({"onnxruntime", "tensorrt"})

    mode: str = option("default", "mode of torch.compile", MODES)
    fullgraph: bool = option(False, "raise an error at a graph break")
    dynamic: str = option(
        "auto",
        "dynamic shapes: kernels for any size (true) or one per size (false); auto: torch decides at the second size",
        ("auto", "true", "false"),
    )
    regional: bool = option(False, "compile the repeated blocks instead of the whole model")
    freeze: bool = option(
        False, "treat weights as constants, which allows folding and reordering them (inference only)"
    )
    coordinate_descent: bool = option(False, "autotune the block sizes of each kernel (slow to compile)")

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> "tuple[Rung, ...]":
        if not machine.is_cuda:
            return (cls(),) if training else (cls(), cls(freeze=True))
        if training:
            return cls(), cls(mode="reduce-overhead"), cls(mode="max-autotune")
        graphs = cls(mode="reduce-overhead")
        return graphs, replace(graphs, freeze=True), cls(mode="max-autotune", freeze=True)

    def fallbacks(self, verdict: str, training: bool) -> "tuple[tuple[Rung, ...], ...]":
        """Returns regional compilation if compiling the whole model failed or took too long.

        Returns nothing for modes that autotune kernels, because autotuning the blocks takes as long as the whole model.
        """
        broke = verdict in ("failed", "unmeasured")
        return ((replace(self, regional=True),),) if broke and not (self.regional or self.autotunes) else ()

    @property
    def autotunes(self) -> bool:
        return self.mode == "max-autotune"

    @property
    def uses_cuda_graphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            return "it is disabled by the environment variable TORCH_COMPILE_DISABLE=1"
        if machine.is_cuda:
            if not machine.has("triton"):
                return "it needs Triton for GPU kernels, which is not installed: pip install triton"
        elif not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))):
            return "it needs a C++ compiler for CPU kernels and found none: install g++ or clang++, or set CXX"
        elif self.mode == "reduce-overhead":
            return "mode=reduce-overhead uses CUDA graphs, which a CPU does not have"
        if job is not None and job.training and self.freeze:
            return "freeze=true treats weights as constants, and training changes them"
        if job is not None and self.regional and not _repeated_blocks(job.model):
            return f"regional=true compiles repeated blocks, and no list of modules has {_MIN_REPEATS} of one class"
        return ""

    def apply(self, job: Job) -> Job:
        cuda = job.device.type == "cuda"
        with quiet():
            compiler = importlib.import_module("torch._inductor.compile_fx")  # its imports emit deprecation warnings
            if cuda:
                # Triggers torch's one-time advice to enable TF32 while `quiet` hides it; TF32 is a rung of its own.
                getattr(compiler, "_warn_tf32_disabled", bool)()
        if type(job.model).__module__.startswith("torch."):
            # Wraps the model, because Dynamo does not compile a root module whose class belongs to torch.
            job = replace(job, model=Boundary(job.model))
        regions = _repeated_blocks(job.model) if self.regional else [job.model]
        for region in regions:
            region.compile(
                fullgraph=self.fullgraph,
                dynamic={"auto": None, "true": True, "false": False}[self.dynamic],
                options=self.compiler_options(cuda),
            )
        evidence = Compiled(cuda and self.uses_cuda_graphs, len(regions), _graphs(), _breaks())
        wrappers, contexts = job.wrappers, job.contexts
        settings = functools.partial(_compiler_settings, self.freeze, len(regions))
        if self.regional and job.training:
            # The settings surround every step, not only those with new input shapes, because blocks are compiled again
            # for the backward pass and for evaluation without gradients.
            contexts = (*contexts, settings)
        elif self.freeze or self.regional:
            wrappers = (*wrappers, functools.partial(_while_compiling, settings=settings))
        if evidence.uses_cuda_graphs:
            wrappers = (*wrappers, _owning_outputs)
        return replace(job, wrappers=wrappers, contexts=contexts).with_evidence(self.name, evidence)

    def compiler_options(self, cuda: bool) -> dict[str, Any]:
        """Returns the options of this rung for torch.compile and for the compiler that packages a model."""
        # torch.compile accepts either a mode or options; a mode is a set of options.
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
        graph_breaks = "no graph break"
        if count:
            reason = breaks.most_common(1)[0][0].strip().splitlines()[0]
            graph_breaks = f"{count} graph break{'s' if count > 1 else ''} (most often: {reason})"
        where = f" for {evidence.regions} blocks" if self.regional else ""
        return f"{graphs} graph{'s' if graphs > 1 else ''} compiled{where}, {graph_breaks}"

    def shape_counts(self, job: Job) -> ShapeCounts:
        evidence: Compiled = job.evidence[self.name]
        recorded = _recorded_cuda_graphs(job.device) if evidence.uses_cuda_graphs else 0
        return ShapeCounts(_graphs() + recorded, *_fallbacks())


def _fallbacks() -> tuple[int, str]:
    """Returns how often torch gave up compiling or capturing a graph, and why."""
    counters = torch._dynamo.utils.counters
    limit = sum(count for reason, count in counters["unimplemented"].items() if "recompile limit" in reason)
    skips = counters["inductor"]["cudagraph_skips"]
    reasons = ["torch's limit of recompilations was reached"] if limit else []
    reasons += ["torch captured no CUDA graph"] if skips else []
    return limit + skips, " and ".join(reasons)


def _recorded_cuda_graphs(device: torch.device) -> int:
    """Returns the number of CUDA graphs that torch has captured.

    Code that is compiled for inputs of any size is captured once for each size that occurs.
    """
    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    manager = trees.get_manager(device.index or 0, create_if_none_exists=False)
    left = [node for nodes in (manager.roots or {}).values() for node in nodes] if manager is not None else []
    count = 0
    while left:
        node = left.pop()
        count += 1
        left += [child for children in node.children.values() for child in children]
    return count


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _breaks() -> Counter[str]:
    return Counter(torch._dynamo.utils.counters["graph_break"])


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that repeat: modules with children, of a class that occurs often in one list of modules."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or container in inside:
            continue
        children = [c for c in container if c not in inside and any(True for _ in c.children())]
        repeats = Counter(type(child) for child in children)
        for child in children:
            if repeats[type(child)] >= _MIN_REPEATS:
                found.append(child)
                inside.update(child.modules())
    return found


@contextmanager
def _compiler_settings(freeze: bool, regions: int) -> Iterator[None]:
    # Imported here because the compiler is large and most plans do not need it.
    from torch._dynamo import config as tracer
    from torch._inductor import config as inductor

    # Sets the attribute directly, because every training step runs this, and `config.patch` takes ten times as long.
    before = tracer.recompile_limit
    tracer.recompile_limit = max(before, regions * _COMPILATIONS_PER_REGION)
    try:
        # The tracer reads `freezing` before the options of torch.compile take effect.
        with inductor.patch(freezing=True) if freeze else nullcontext():
            yield
    finally:
        tracer.recompile_limit = before


def _while_compiling(function: Callable[..., Any], settings: Context) -> Callable[..., Any]:
    """Applies compiler settings to the first call with each combination of inputs; later calls do not compile."""
    seen: set[Any] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        form = input_form(args, kwargs)
        if form in seen:
            return function(*args, **kwargs)
        with settings():
            output = function(*args, **kwargs)
        seen.add(form)
        return output

    return run


def _owning_outputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copies outputs out of the memory that the next replay overwrites."""

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map_only(Tensor, lambda leaf: leaf.clone() if leaf.is_cuda else leaf, function(*args, **kwargs))

    return run
