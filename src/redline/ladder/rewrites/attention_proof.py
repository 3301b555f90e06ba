"""Proves that a rewritten module is equivalent to the original by running both on the same inputs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.errors import first_line
from redline.ladder.gate import tensors_of
from redline.ladder.metrics import relative_error
from redline.ladder.rewrites.attention import Site, attend, attend_in_fp32, fused_attention_in_fp32
from redline.ladder.rewrites.attention_match import Match, NoMatch
from redline.ladder.rewrites.sample_run import state_preserved
from redline.machine.trees import tree_leaves, tree_map

# fp32 rounds at 6e-8; sums over a few thousand keys in a different order differ by far less than this.
TOLERANCE = 1e-5


def prove(
    original: type[nn.Module],
    module: nn.Module,
    site: Site,
    untouched: fx.Graph,
    graph: fx.Graph,
    matches: list[Match],
    gradients: bool,
) -> None:
    """Runs original and rewritten code in fp32 on recorded and random arguments; raises `NoMatch` if they differ."""
    twin = copy.deepcopy(module).float()
    twin.__class__ = original
    try:
        old, new = _without_dropout(untouched, matches), _without_dropout(graph, [])
        # With dropout no two runs agree, so the rewritten code is compared with the traced code without dropout.
        random = len(old.nodes) != len(untouched.nodes) or _uses_dropout(untouched)
        plain = function_of(module, old) if random else original.forward
        rewritten = function_of(module, new)
        with state_preserved(twin), sdpa_kernel(SDPBackend.MATH), _full_precision():
            for fresh in (False, True):
                given = (site.args, site.kwargs)
                args, kwargs = tree_map(partial(_trial_input, fresh=fresh), given)
                expected = _run(plain, twin, args, kwargs, gradients)
                _compare(expected, _run(rewritten, twin, args, kwargs, gradients))
    except NoMatch:
        raise
    except Exception as error:
        raise NoMatch(f"it cannot be run separately: {first_line(error)}") from error


def _compare(expected: list[Tensor], seen: list[Tensor]) -> None:
    if [e.shape for e in expected] != [s.shape for s in seen]:
        raise NoMatch("the rewritten module returns a different shape")
    error = relative_error(expected, seen)
    if not error <= TOLERANCE:
        raise NoMatch(f"equality is not proven: relative error {error:.1e}")


def _trial_input(leaf: Any, fresh: bool) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    leaf = leaf.float()
    additive_mask = torch.isinf(leaf).any() and not torch.isnan(leaf).any()
    return torch.randn_like(leaf) if not additive_mask and (fresh or not torch.isfinite(leaf).all()) else leaf


_ATTENTION = (attend, attend_in_fp32, F.scaled_dot_product_attention, fused_attention_in_fp32)


def _uses_dropout(graph: fx.Graph) -> bool:
    """Returns whether an attention call of the graph uses dropout."""
    calls = [node for node in graph.nodes if node.target in _ATTENTION]
    return any(node.kwargs.get("dropout_p") or (node.target in _ATTENTION[2:] and node.args[4:5]) for node in calls)


def _without_dropout(graph: fx.Graph, matches: list[Match]) -> fx.Graph:
    """Returns the same graph without dropout on the attention weights."""
    names = {found.dropout.name for found in matches if found.dropout is not None and found.dropout_p}
    bare = copied(graph)
    for node in list(bare.nodes):
        if node.name in names:
            node.replace_all_uses_with(node.all_input_nodes[0])
            bare.erase_node(node)
        elif node.target in _ATTENTION:
            if node.target in _ATTENTION[2:] and len(node.args) > 4:
                node.args = (*node.args[:4], 0.0, *node.args[5:])
            else:
                node.kwargs = {**node.kwargs, "dropout_p": 0.0}
    return bare


def _run(function: Callable[..., Any], twin: nn.Module, args: Any, kwargs: Any, gradients: bool) -> list[Tensor]:
    """Returns the outputs and, for training, the gradients of inputs and parameters, with a fixed random seed."""

    def leaf(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_(gradients) if floating else value

    args, kwargs = tree_map(leaf, (args, kwargs))
    with state_preserved(twin), torch.set_grad_enabled(gradients):
        torch.manual_seed(0)
        output = [t for t in tensors_of(function(twin, *args, **kwargs)) if t.is_floating_point()]
        if not gradients:
            return output
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [*given, *(p for p in twin.parameters() if p.requires_grad)]
        # The loss is a weighted sum of the outputs, because the plain sum of a softmax has a zero gradient.
        weights = [torch.linspace(-1, 1, t.numel(), device=t.device).reshape(t.shape) for t in output]
        total = torch.stack([(t * w).sum() for t, w in zip(output, weights, strict=True)]).sum()
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        zeros = [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]
        # Scales the gradients to the norm of the outputs, so that one relative error can cover both.
        size = torch.cat([t.detach().flatten() for t in output]).norm()
        scale = size / torch.cat([g.flatten() for g in zeros]).norm().clamp_min(1e-30)
        return [*(t.detach() for t in output), *(g * scale for g in zeros)]


@contextmanager
def _full_precision() -> Iterator[None]:
    """Disables TF32 while two results are compared."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def function_of(module: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    return type(fx.GraphModule(module, graph)).forward
