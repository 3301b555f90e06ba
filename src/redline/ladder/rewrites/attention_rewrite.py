"""Rewrites the attention inside the modules of a model, and proves that each rewritten module is equivalent.

Each module is traced separately, with its children as leaves. Its class is replaced by a subclass with the rewritten
`forward`, so names, parameters and the state dict do not change. A call that the proof does not cover (different
arguments, or training instead of evaluation) uses the original `forward`.
"""

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from redline.errors import first_line
from redline.ladder.rewrites.attention import Observation, Site, attend, attend_in_fp32, fused_attention_in_fp32
from redline.ladder.rewrites.attention_match import Match, NoMatch, insert_attend, match, softmaxes
from redline.ladder.rewrites.attention_proof import copied, function_of, prove
from redline.ladder.rewrites.attention_switch import Rewriting
from redline.ladder.rewrites.sample_run import state_preserved

_GRAPH = "_redline_attention_graph"
_ORIGINAL = "_redline_original_class"


class _Tracer(fx.Tracer):
    """Traces the code of one module: calls of children stay calls, and buffers are read at run time."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def fuse(model: nn.Module, seen: Observation, gradients: bool) -> Rewriting:
    """Replaces hand-written attention by fused attention where equality is proven."""
    return _rewrite(model, seen.handwritten, gradients, _fuse_graph)


def lift_to_fp32(model: nn.Module, seen: Observation, gradients: bool) -> Rewriting:
    """Computes the scores of all attention in fp32, fused or hand-written."""
    return _rewrite(model, {**seen.handwritten, **seen.fused}, gradients, _lift_graph)


_Change = Callable[[fx.Graph, nn.Module, Site], list[Match]]


def _rewrite(model: nn.Module, sites: dict[str, Site], gradients: bool, change: _Change) -> Rewriting:
    result = Rewriting()
    classes: dict[Any, type] = {}
    for name, site in sites.items():
        module = model.get_submodule(name)
        try:
            replacement = _replacement(module, site, gradients, change, classes)
        except NoMatch as reason:
            result.left.append((name or "the model itself", str(reason)))
            continue
        result.undos.append(partial(setattr, module, "__class__", module.__class__))
        module.__class__ = replacement
        result.done.append(name or "the model itself")
    return result


def _replacement(
    module: nn.Module, site: Site, gradients: bool, change: _Change, classes: dict[Any, type]
) -> type[nn.Module]:
    original: type[nn.Module] = getattr(type(module), _ORIGINAL, type(module))
    constants = _constants(original, module, site)
    earlier: fx.Graph | None = getattr(type(module), _GRAPH, None)
    graph = _trace(original, module, constants) if earlier is None else copied(earlier)
    untouched = copied(graph)
    try:
        matches = change(graph, module, site)
        graph.lint()
    except NoMatch:
        raise
    except Exception as error:
        raise NoMatch(f"rewriting its graph failed: {first_line(error)}") from error
    prove(original, module, site, untouched, graph, matches, gradients)
    # Blocks with the same code share one class, so that the compiler compiles them once.
    code = graph.python_code("self").src
    key = (original, code, module.training, tuple(constants.items()))
    if key not in classes:
        classes[key] = _subclass(original, module, graph, site)
    return classes[key]


def _constants(original: type[nn.Module], module: nn.Module, site: Site) -> dict[str, Any]:
    """Returns the non-tensor arguments, whose values the trace assumes to be constant."""
    bound = _bound(original, module, site)
    constants = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if value:
                raise NoMatch(f"it takes *{name}")
        elif not isinstance(value, Tensor):
            if value is not None and not isinstance(value, (bool, int, float, str)):
                raise NoMatch(f"its argument {name} has the unsupported type {type(value).__name__}")
            constants[name] = value
    return constants


def _bound(original: type[nn.Module], module: nn.Module, site: Site) -> inspect.BoundArguments:
    """Returns the arguments of the recorded call by name, including defaults."""
    bound = inspect.signature(original.forward).bind(module, *site.args, **site.kwargs)
    bound.apply_defaults()
    return bound


def _trace(original: type[nn.Module], module: nn.Module, constants: dict[str, Any]) -> fx.Graph:
    tracer = _Tracer()
    try:
        graph = tracer.trace(module, concrete_args=dict(constants) or None)
    except Exception as error:
        reason = "its control flow depends on data" if isinstance(error, TraceError) else first_line(error)
        raise NoMatch(f"it cannot be traced: {reason}") from error
    # The tracer appends a number to the names of constant placeholders, which breaks keyword arguments.
    names = list(inspect.signature(original.forward).parameters)[1:]
    for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], names, strict=False):
        node.target = ("*" * str(node.target).count("*")) + name
    # Removes the assertions about constants: the new forward checks them before it calls the graph.
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none"):
            inputs = node.all_input_nodes
            graph.erase_node(node)
            for above in inputs:
                if not above.users and above.op != "placeholder":
                    graph.erase_node(above)
    return graph


def _fuse_graph(graph: fx.Graph, module: nn.Module, site: Site) -> list[Match]:
    modules = dict(module.named_modules())
    values = _values(graph, module, site)
    matches = []
    for softmax in softmaxes(graph, modules):
        found = match(softmax, modules)
        insert_attend(graph, found, _is_causal(found, module, values), found.dropout_p)
        matches.append(found)
    if not matches:
        raise NoMatch("its softmax is in a function that cannot be traced")
    return matches


def _lift_graph(graph: fx.Graph, module: nn.Module, site: Site) -> list[Match]:
    matches = _fuse_graph(graph, module, site) if softmaxes(graph, dict(module.named_modules())) else []
    in_fp32 = {attend: attend_in_fp32, F.scaled_dot_product_attention: fused_attention_in_fp32}
    lifted = [node for node in graph.nodes if node.op == "call_function" and node.target in in_fp32]
    if not lifted:
        raise NoMatch("its attention is in a function that cannot be traced")
    for node in lifted:
        node.target = in_fp32[node.target]
    return matches


def _values(graph: fx.Graph, module: nn.Module, site: Site) -> dict[str, Any]:
    """Returns the value of each node of the graph for the recorded arguments."""
    seen: dict[str, Any] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            seen[n.name] = super().run_node(n)
            return seen[n.name]

    given = _bound(getattr(type(module), _ORIGINAL, type(module)), module, site).arguments
    placeholders = [str(node.target).lstrip("*") for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), state_preserved(module):
        Watch(fx.GraphModule(module, graph)).run(*(given[name] for name in placeholders))
    return seen


def _is_causal(found: Match, module: nn.Module, values: dict[str, Any]) -> bool:
    """Returns whether the mask is causal: lower-triangular, and computed only from buffers and sizes."""
    scores = found.scores
    if len(scores.biases) + len(scores.blocked) != 1:
        return False
    node = scores.biases[0] if scores.biases else scores.blocked[0][0]
    value = values.get(node.name)
    if not isinstance(value, Tensor) or value.ndim < 2 or not _is_constant(node, module):
        return False
    length, width = value.shape[-2:]
    if length != width or length < 2 or value.numel() != length * width:
        return False
    value = value.reshape(length, width)
    if scores.blocked:
        allowed = value.bool() if scores.blocked[0][1] else ~value.bool()
    elif bool(((value == 0) | (value == float("-inf"))).all()):
        allowed = value == 0
    else:
        return False
    return torch.equal(allowed, torch.ones_like(allowed).tril())


def _is_constant(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "get_attr":
        return not isinstance(operator.attrgetter(str(node.target))(module), nn.Parameter)
    if node.op in ("placeholder", "call_module"):
        return False
    if node.op == "call_method" and node.target in ("size", "dim"):
        return True
    name = getattr(node.target, "__name__", "")
    if name == "getattr" and node.args[1] in ("shape", "ndim", "device", "dtype"):
        return True
    return all(_is_constant(above, module) for above in node.all_input_nodes)


def _subclass(original: type[nn.Module], module: nn.Module, graph: fx.Graph, site: Site) -> type[nn.Module]:
    fast = function_of(module, graph)
    training, count = module.training, len(site.args)
    wanted = [Tensor if isinstance(a, Tensor) else a for a in site.args]
    wanted_by_name = {k: Tensor if isinstance(v, Tensor) else v for k, v in site.kwargs.items()}

    def fits(value: Any, want: Any) -> bool:
        return isinstance(value, Tensor) if want is Tensor else type(value) is type(want) and value == want

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        proven = self.training is training and len(args) == count and kwargs.keys() == wanted_by_name.keys()
        if proven:
            for value, want in zip(args, wanted, strict=True):
                proven = proven and fits(value, want)
            for name, value in kwargs.items():
                proven = proven and fits(value, wanted_by_name[name])
        return fast(self, *args, **kwargs) if proven else original.forward(self, *args, **kwargs)

    return type(original.__name__, (original,), {"forward": forward, _GRAPH: graph, _ORIGINAL: original})
