"""Applies a plan to a language model: its rungs optimize the decode step, and prompts use the same weights.

The decode step has few shapes, which suits compilers and CUDA graphs. Prompts have any length, so steps with prompts
run uncompiled, through the same converted or quantized layers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.generation.language_model import PagedModel, PiecewiseModel
from redline.ladder.job import Applied, Job, entered
from redline.ladder.plan import Plan, read_plan
from redline.ladder.plans.choose import choose_plan
from redline.ladder.rewrites.io_adapter import unwrapped
from redline.ladder.rungs.cuda_graph import CudaGraph
from redline.machine.machine import Machine
from redline.models.decoder.paged_cache import FlatCall

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONVERTING = ("bf16", "fp16", "autocast")


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model: the dtype of the weights, and the plan to apply."""

    dtype: torch.dtype
    plan: Plan


def choose_load_options(machine: Machine, precision: str = "auto", plan: Plan | str | None = None) -> LoadOptions:
    """Returns the dtype and the plan. Raises RedlineError if the precision is unknown or cannot run on this machine.

    `plan` replaces the plan that the precision would select: a `Plan`, its text, or the path of a .toml file. If this
    plan converts the dtype, the weights are loaded in fp32. int8 and fp8 quantize only the weights, because a decode
    step spends most of its time on reading weights.
    """
    given = None if plan is None else read_plan(plan)
    chosen = choose_plan("generate", machine, precision, given).plan
    usual = "bf16" if machine.is_cuda and not machine.why_slow("bf16") else "fp32"
    if given is not None and any(name in given for name in _CONVERTING):
        usual = "fp32"
    return LoadOptions(_DTYPES.get(precision, _DTYPES[usual]), chosen)


class DecodeStep(nn.Module):
    """A module whose forward is the decode step. Without `past` it is a prefill, which rungs run on sample prompts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, past: Any = None) -> Tensor:
        """Takes new tokens with a cache or a `FlatCall` as `past`, or prompts (B, S) of equal length without `past`."""
        model: Any = self.model
        if isinstance(past, FlatCall):
            return model.flat(tokens, past)
        if past is not None:
            return model.step(tokens, past)
        batch, length = tokens.shape
        return model.prefill(tokens, torch.full((batch,), length, device=tokens.device), model.new_cache(batch, length))


@dataclass(frozen=True)
class PlannedModel:
    """A `LanguageModel` with a plan applied: a `PagedModel` or a `StateModel`.

    It is also a `PiecewiseModel`, unless `piece` returns 0.
    """

    applied: Applied
    plan: Plan

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, share: bool, samples: Sequence[Tensor] = ()) -> "PlannedModel":
        """Applies the plan to the model itself if `share`, otherwise to a copy. `samples` are prompts of shape (1, S).

        A plan without rungs changes no weights, so then the copy shares the weights of the original.
        """
        plan = without_graphs(plan)
        if not plan.rungs:
            model, share = with_the_same_weights(model), True
        job = Job.of(DecodeStep(model), tuple(samples), share=share)
        job.model.eval()
        resolved, job = plan.build(job, Machine.detect(str(job.device)))
        return cls(Applied(job), resolved)

    @property
    def model(self) -> Any:
        return unwrapped(self.applied.model).model

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary

    @property
    def context(self) -> int | None:
        return self.model.context

    @property
    def is_paged(self) -> bool:
        """Whether the model's cache consists of pages; otherwise it is a state of fixed size for each row."""
        return isinstance(self.model, PagedModel)

    def flat(self, tokens_T: Tensor, call: FlatCall, is_decode: bool) -> Tensor:
        """Runs the flat call of a paged model. Only decode steps run the module that the rungs may have compiled."""
        if is_decode:
            return self.applied(tokens_T, call)
        with entered(self.applied.job.contexts):
            return self.model.flat(tokens_T, call)

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Returns the hidden states (B, S, W) of whole texts."""
        if not hasattr(self.model, "hidden"):
            raise ModelError("this model gives no hidden states, which embeddings need.")
        with entered(self.applied.job.contexts):
            return self.model.hidden(tokens_BS)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits after hidden states."""
        with entered(self.applied.job.contexts):
            return self.model.head(hidden)

    def new_pages(self, count: int, size: int) -> Any:
        return self.model.new_pages(count, size)

    def new_cache(self, batch: int, length: int) -> Any:
        return self.model.new_cache(batch, length)

    def prefill(self, tokens_BS: Tensor, counts_B: Tensor, cache: Any) -> Tensor:
        with entered(self.applied.job.contexts):
            return self.model.prefill(tokens_BS, counts_B, cache)

    def piece(self, most: int) -> int:
        return self.model.piece(most) if isinstance(self.model, PiecewiseModel) else 0

    def until_piece(self, cache: Any) -> int | None:
        return self.model.until_piece(cache) if isinstance(self.model, PiecewiseModel) else None

    def prepare_piece(self, tokens: int, cache: Any) -> None:
        self.model.prepare_piece(tokens, cache)

    def take_in(self, tokens_BS: Tensor, cache: Any) -> Tensor:
        with entered(self.applied.job.contexts):
            return self.model.take_in(tokens_BS, cache)

    def prepare(self, cache: Any) -> None:
        with entered(self.applied.job.contexts):
            self.model.prepare(cache)

    def step(self, tokens_B: Tensor, cache: Any) -> Tensor:
        return self.applied(tokens_B, cache)

    def proofs(self) -> dict[str, str]:
        """Returns each rung's report of what it did. Must be called after a step has run."""
        return {str(rung): rung.proof(self.applied.job) for rung in self.plan.rungs}


def with_the_same_weights(model: nn.Module) -> nn.Module:
    """Copies the modules but not the weights, so that the copy and the original can be in different modes."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def without_graphs(plan: Plan) -> Plan:
    """Removes CUDA graphs from a plan: the engine captures the whole step, and graphs cannot be nested."""
    rungs = (CudaGraph().adjust_other(rung) for rung in plan.rungs if rung.name != "cuda_graph")
    return Plan(tuple(rung for rung in rungs if rung is not None))
