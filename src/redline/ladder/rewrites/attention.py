"""Finds the attention calls of a model, and computes attention for rewritten modules.

`observe` runs a sample and records every `scaled_dot_product_attention` and every softmax between two products,
together with the module that calls it and the arguments of that module. Rewritten modules call `attend`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from redline.ladder.job import Job, entered
from redline.ladder.rewrites.sample_run import on_device, state_preserved, watch_inputs, watch_outputs
from redline.ladder.workload import call
from redline.machine.trees import tree_map_only

PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "einsum"})
MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`: the properties that determine the kernel and its speed."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    boolean_mask: bool = False
    causal: bool = False
    dropout_p: float = 0.0
    grouped: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, gradients: bool = False) -> dict[str, Any]:
        """Returns random arguments with these shapes, to time the kernels."""
        generator = torch.Generator(device).manual_seed(0)

        def random(shape: Sequence[int]) -> Tensor:
            # Four-dimensional tensors have the memory layout that a projection produces: heads inside the sequence
            # dimension.
            swapped = len(shape) == 4
            stored = (shape[0], shape[2], shape[1], shape[3]) if swapped else shape
            tensor = torch.randn(stored, dtype=dtype, device=device, generator=generator)
            return (tensor.transpose(1, 2) if swapped else tensor).requires_grad_(gradients)

        mask = None
        if self.mask is not None:
            # The mask blocks no key: it is True everywhere if boolean, and 0 everywhere if added.
            mask = torch.full(
                self.mask, self.boolean_mask, dtype=torch.bool if self.boolean_mask else dtype, device=device
            )
        return {
            "query": random(self.query),
            "key": random(self.key),
            "value": random(self.value),
            "attn_mask": mask,
            "dropout_p": self.dropout_p,
            "is_causal": self.causal,
            "enable_gqa": self.grouped,
        }


@dataclass
class Site:
    """A module whose code computes attention, with the arguments of its first call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    softmaxes: int = 0
    products: int = 0
    fused_calls: int = 0

    @property
    def handwritten(self) -> bool:
        return self.softmaxes > 0 and self.products >= 2


@dataclass
class Observation:
    """The attention calls and attention modules of one run."""

    calls: Counter[AttentionCall] = field(default_factory=Counter)
    sites: dict[str, Site] = field(default_factory=dict)

    @property
    def handwritten(self) -> dict[str, Site]:
        return {name: site for name, site in self.sites.items() if site.handwritten}

    @property
    def fused(self) -> dict[str, Site]:
        return {name: site for name, site in self.sites.items() if site.fused_calls}


class _Observer(TorchFunctionMode):
    """Sees every torch call from Python and records those of attention; `stack` holds the modules that are running."""

    def __init__(self, stack: list[tuple[str, tuple[Any, ...], dict[str, Any]]], seen: Observation) -> None:
        super().__init__()
        self.stack = stack
        self.seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.seen.calls[_attention_call(*args, **kwargs)] += 1
            self._site().fused_calls += 1
        elif name == "softmax":
            self._site().softmaxes += 1
        elif name in PRODUCTS:
            self._site().products += 1
        return func(*args, **kwargs)

    def _site(self) -> Site:
        if not self.stack:
            return Site((), {})
        name, *given = self.stack[-1]
        if name not in self.seen.sites:
            copied = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), given)
            self.seen.sites[name] = Site(*copied)
        return self.seen.sites[name]


def _attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    return AttentionCall(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        None if attn_mask is None else tuple(attn_mask.shape),
        attn_mask is not None and attn_mask.dtype == torch.bool,
        is_causal,
        dropout_p,
        enable_gqa,
    )


def observe(job: Job) -> Observation:
    """Runs the first sample without gradients and without changing the model."""
    seen = Observation()
    stack: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    # Leaves out torch's own modules, so that the softmax of an nn.Softmax counts for the module that uses it.
    modules = {n: m for n, m in job.model.named_modules() if not type(m).__module__.startswith("torch.nn.")}
    with (
        watch_inputs(modules, lambda name, args, kwargs: stack.append((name, args, kwargs))),
        watch_outputs(modules, lambda name, output: stack.pop()),
        torch.no_grad(),
        state_preserved(job.model),
        entered(job.contexts),
        _Observer(stack, seen),
    ):
        call(job.model, on_device(job.samples[0], job.device))
    return seen


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    blocked: Tensor | None = None,
    fill: float = MINUS_INFINITY,
    scale: float | Tensor = 1.0,
    dropout_p: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Returns softmax((query @ keyᵀ · scale + bias).masked_fill(blocked, fill)) @ value, with a fused kernel of torch.

    `causal` guarantees that `blocked` or `bias` is the causal mask whenever there are as many queries as keys.
    """
    if isinstance(scale, Tensor):
        query, scale = (query * scale).to(query.dtype), 1.0
    is_causal = causal and query.shape[-2] == key.shape[-2]
    mask = None if is_causal else _mask(bias, blocked, fill, query.dtype)
    if query.shape[:-2] != key.shape[:-2] or key.shape[:-2] != value.shape[:-2]:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (t.expand(*batch, *t.shape[-2:]) for t in (query, key, value))
    batch = query.shape[:-2]
    # The fused kernels need exactly four dimensions.
    if len(batch) == 1:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    elif len(batch) > 2 and mask is None:
        query, key, value = (t.flatten(0, t.ndim - 4) for t in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    return output if output.shape[:-2] == batch else output.reshape(*batch, *output.shape[-2:])


def _mask(bias: Tensor | None, blocked: Tensor | None, fill: float, dtype: torch.dtype) -> Tensor | None:
    if blocked is None:
        return None if bias is None else bias.to(dtype)
    if bias is not None:
        return torch.where(blocked, fill, bias).to(dtype)
    # If all keys of a query are blocked, a finite fill value gives uniform weights, but a boolean mask does not.
    # Therefore a boolean mask is used only if the fill value is minus infinity.
    return blocked.logical_not() if fill == MINUS_INFINITY else torch.where(blocked, fill, 0.0).to(dtype)


def attend_in_fp32(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Like `attend`, with products and softmax in fp32 and the output in the dtype of `value`."""
    with torch.autocast(query.device.type, enabled=False):
        return attend(query.float(), key.float(), value.float(), *args, **kwargs).to(value.dtype)


def fused_attention_in_fp32(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Like `scaled_dot_product_attention`, computed in fp32 with the output in the dtype of `value`."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.float()
    wide = query.float(), key.float(), value.float()
    with torch.autocast(query.device.type, enabled=False):
        return F.scaled_dot_product_attention(*wide, attn_mask, *args, **kwargs).to(value.dtype)
