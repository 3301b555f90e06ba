"""checkpoint: discards activations in the forward pass and recomputes them in the backward pass.

Training keeps every activation until the backward pass uses it; in a deep model, activations need more memory than
weights. A checkpointed block saves only its input and runs its forward pass again in the backward pass, which trades
compute for memory. `selective` saves the results of expensive operations (matrix products, convolutions, attention) and
recomputes only the cheap pointwise operations.

A block stays the same object with the same name and parameters; its class is replaced by a subclass whose forward
calls `torch.utils.checkpoint`. The random state is restored, so dropout uses the same mask.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from redline.ladder.job import Job
from redline.ladder.rung import Rung, Stage, option
from redline.machine.machine import Machine
from redline.nn.checkpointing import EXPENSIVE_OPS

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class _Record:
    """Counts runs and traces of the wrapped blocks; traces are needed because compiled code cannot count its runs."""

    wrapped: int = 0
    forwards: int = 0
    runs: int = 0
    traces: int = 0
    kept_results: set[str] = field(default_factory=set)


def find_blocks(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Returns the repeated blocks by name: members of the outermost lists with two or more modules of one class."""
    found: dict[str, nn.Module] = {}
    children = {name: child for name, child in model.named_children() if _is_block(child)}
    counts = Counter(type(child) for child in children.values()) if isinstance(model, _CONTAINERS) else Counter()
    for name, child in model.named_children():
        inside = find_blocks(child, f"{prefix}{name}.")
        repeated = name in children and counts[type(child)] >= 2
        # In a Sequential of Sequentials, the outer one is a list of stages and the blocks are one level down.
        if repeated and not (isinstance(child, _CONTAINERS) and inside):
            found[prefix + name] = child
        else:
            found.update(inside)
    return found


def _is_block(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward or next(module.parameters(), None) is None:
        return False
    # A single torch layer saves little more than its input, which a checkpoint also saves.
    return next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")


def find_layers(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns the direct children with weights (attention, MLP) of the blocks, except single layers of torch."""
    children = {f"{name}.{child}": module for name, block in blocks.items() for child, module in block.named_children()}
    return {name: module for name, module in children.items() if _is_block(module)}


def _checkpointed(cls: type[nn.Module], record: _Record, selective: bool) -> type[nn.Module]:
    """Returns a subclass that runs the same forward under a checkpoint."""

    # The compiler calls this while it traces. Reading the block's name would add a guard that recompiles each block.
    @torch.compiler.assume_constant_result
    def note_trace() -> bool:
        record.traces += 1
        return True

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.name().removeprefix("aten::").partition(".")[0]
        if name in EXPENSIVE_OPS:
            record.kept_results.add(name)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    # Passes arguments as one tuple and one dict, so that their names cannot collide with options of `checkpoint`.
    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            record.runs += 1
        return cls.forward(self, *args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            note_trace()
        else:
            record.forwards += 1
        return checkpoint(run, self, args, kwargs, **options)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__})


@dataclass(frozen=True)
class Checkpoint(Rung):
    name = "checkpoint"
    stage = Stage.MEMORY
    summary = "activations recomputed in the backward pass instead of saved"
    inference = False
    # A checkpoint reads the random state from the GPU to save it, which a CUDA graph capture forbids.
    excludes = frozenset({"compress_activations", "cuda_graph"})

    granularity: str = option("block", "unit of recomputation", ("block", "layer", "selective"))
    every: int = option(1, "checkpoint every n-th block", at_least=1)

    @classmethod
    def variants(cls, machine: Machine, training: bool = False) -> tuple[Rung, ...]:
        return (cls("block"), cls("layer"), cls("selective"))

    def _targets(self, model: nn.Module) -> dict[str, nn.Module]:
        blocks = dict(list(find_blocks(model).items())[:: self.every])
        return find_layers(blocks) if self.granularity == "layer" else blocks

    def why_not(self, machine: Machine, job: Job | None = None) -> str:
        if job is None or self._targets(job.model):
            return ""
        if self.granularity == "layer" and find_blocks(job.model):
            return "no block has a child with layers: use granularity=block"
        return "the model has no repeated blocks (a ModuleList or Sequential with two or more of one class)"

    def apply(self, job: Job) -> Job:
        record = _Record()
        subclasses: dict[type[nn.Module], type[nn.Module]] = {}
        targets = self._targets(job.model)
        # Keyed by the module's id, because a block that is used twice is wrapped once.
        for module in {id(module): module for module in targets.values()}.values():
            cls = type(module)
            if cls not in subclasses:
                subclasses[cls] = _checkpointed(cls, record, self.granularity == "selective")
            module.__class__ = subclasses[cls]
            record.wrapped += 1
        return job.with_evidence(self.name, record)

    def proof(self, job: Job) -> str:
        record: _Record = job.evidence[self.name]
        again = record.runs - record.forwards
        if not again and not record.traces:
            return ""
        what = "parts of blocks" if self.granularity == "layer" else "blocks"
        parts = [f"{record.wrapped} {what} checkpointed"]
        if record.forwards:
            parts.append(f"{again} of {record.forwards} forward passes recomputed in the backward pass")
        elif again:
            parts.append(f"blocks ran {again} times outside of compiled graphs")
        if record.traces:
            parts.append(f"recomputation traced {record.traces} times by the compiler")
        if self.granularity == "selective":
            parts.append(f"saved the results of {', '.join(sorted(record.kept_results)) or 'no operation'}")
        return "; ".join(parts)
