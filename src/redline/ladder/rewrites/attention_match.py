"""Finds softmax(query @ keyᵀ · scale + mask) @ value in a traced module and replaces it by one call.

The search starts at each softmax and follows the graph up, through masks and scales, to the product that computes the
scores, and down, through casts and dropout, to the product with the values. Every node in between must have exactly one
user.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from redline.ladder.rewrites.attention import MINUS_INFINITY, PRODUCTS, attend

# Fill values of masks must not exceed this: only then, adding the value to a score has the effect of overwriting it.
_LARGEST_FILL = -1e8
_CASTS = frozenset({"float", "to", "type_as", "type", "half", "bfloat16", "double", "contiguous"})


class NoMatch(Exception):
    """Raised if a softmax does not belong to attention that can be rewritten; the message says why."""


@dataclass(frozen=True)
class Scores:
    """The operations between the product of queries and keys and the softmax."""

    product: fx.Node
    query: fx.Node
    key: fx.Node
    key_is_transposed: bool
    scales: tuple[tuple[str, Any], ...] = ()
    biases: tuple[Any, ...] = ()
    # Boolean mask nodes, each with a flag: True if the mask marks the keys to attend to, False if the keys to block.
    blocked: tuple[tuple[fx.Node, bool], ...] = ()
    fill: float = MINUS_INFINITY


@dataclass(frozen=True)
class Match:
    scores: Scores
    value: fx.Node
    value_is_transposed: bool
    output: fx.Node
    dropout: fx.Node | None
    dropout_p: float
    einsum_axes: tuple[tuple[int, ...], ...] = ()


def softmaxes(graph: fx.Graph, modules: dict[str, nn.Module]) -> list[fx.Node]:
    def is_softmax(node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(modules[str(node.target)], nn.Softmax)
        return _is(node, "softmax")

    return [node for node in graph.nodes if is_softmax(node)]


def match(softmax: fx.Node, modules: dict[str, nn.Module]) -> Match:
    """Returns the attention that contains the softmax; raises `NoMatch` if there is none."""
    scores = _scores(_single_use(_argument(softmax, 0, "input"), softmax))
    if scores is None:
        raise NoMatch("its softmax is not over a product of queries and keys")
    node, dropout, dropout_p = softmax, None, 0.0
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise NoMatch("its attention weights are used elsewhere")
        user = users[0]
        if _is(user, *_CASTS):
            node = user
        elif (probability := _dropout_probability(user, modules)) is not None:
            node, dropout, dropout_p = user, user, probability
        else:
            break
    if _is(user, "einsum"):
        return _with_einsum_values(user, node, Match(scores, node, False, user, dropout, dropout_p))
    if _is(scores.product, "einsum"):
        raise NoMatch("it mixes einsum with other products")
    if _is(user, *PRODUCTS) and user.args[0] is node and isinstance(user.args[1], fx.Node):
        return Match(scores, user.args[1], False, user, dropout, dropout_p)
    # value @ weightsᵀ is the transpose of weights @ valueᵀ.
    if _transposes_last_two(user) and len(user.users) == 1:
        product = next(iter(user.users))
        if _is(product, "matmul", "bmm") and product.args[1] is user and isinstance(product.args[0], fx.Node):
            return Match(scores, product.args[0], True, product, dropout, dropout_p)
    raise NoMatch("its attention weights are not directly multiplied with the values")


def insert_attend(graph: fx.Graph, found: Match, causal: bool, dropout_p: float) -> fx.Node:
    """Replaces the match by one call of `attend` and returns the new node."""
    scores, output = found.scores, found.output
    with graph.inserting_before(output):
        query, key, value = scores.query, scores.key, found.value
        if found.einsum_axes:
            query_axes, key_axes, value_axes, output_axes = found.einsum_axes
            query, key = _permuted(graph, query, query_axes), _permuted(graph, key, key_axes)
            value = _permuted(graph, value, value_axes)
        else:
            output_axes = ()
            if scores.key_is_transposed:
                key = graph.call_method("transpose", (key, -2, -1))
            if found.value_is_transposed:
                value = graph.call_method("transpose", (value, -2, -1))
        conditions = (
            graph.call_function(torch.logical_not, (node,)) if inverted else node for node, inverted in scores.blocked
        )
        bias = _folded(graph, operator.add, scores.biases)
        masks = {"bias": bias, "blocked": _folded(graph, torch.logical_or, conditions), "fill": scores.fill}
        settings = {"scale": _scale(graph, scores), "dropout_p": dropout_p, "causal": causal}
        node = graph.call_function(attend, (query, key, value), masks | settings)
        result = graph.call_method("transpose", (node, -2, -1)) if found.value_is_transposed else node
        result = _permuted(graph, result, output_axes)
    output.replace_all_uses_with(result)
    # Dead-code elimination keeps in-place operations, so the old nodes are erased explicitly.
    _erase(graph, output)
    return node


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    if node.users or node.op == "placeholder" or node not in graph.nodes:
        return
    above = node.all_input_nodes
    graph.erase_node(node)
    for other in above:
        _erase(graph, other)


def _is(node: Any, *names: str) -> bool:
    """Returns whether the node calls one of these operations, as a function or as a method of a tensor."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_function":
        return getattr(node.target, "__name__", "") in names
    return node.op == "call_method" and node.target in names


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _single_use(node: Any, user: fx.Node) -> fx.Node:
    if not isinstance(node, fx.Node) or list(node.users) != [user]:
        raise NoMatch("its attention scores are used elsewhere")
    return node


def _scores(node: Any, depth: int = 0) -> Scores | None:
    """Follows a node up to a product of two tensors and collects the operations in between."""
    if not isinstance(node, fx.Node) or depth > 12:
        return None
    if _is(node, "einsum"):
        return _einsum_scores(node)
    if _is(node, *PRODUCTS):
        query, key = node.args[0], _argument(node, 1, "other")
        if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
            return None
        if _transposes_last_two(key):
            return Scores(node, query, key.all_input_nodes[0], False)
        return Scores(node, query, key, True)
    if _is(node, *_CASTS):
        return _above(node, 0, depth)
    if _is(node, "mul", "imul", "mul_"):
        return _either(node, depth, lambda scores, other: _scaled(scores, "mul", other))
    if _is(node, "div", "truediv", "itruediv", "div_"):
        above = _above(node, 0, depth)
        return above and _scaled(above, "div", _argument(node, 1, "other"))
    if _is(node, "add", "iadd", "add_") and not node.kwargs.get("alpha"):
        return _either(node, depth, _biased)
    if _is(node, "masked_fill", "masked_fill_"):
        above = _above(node, 0, depth)
        return above and _filled(above, _argument(node, 1, "mask"), _argument(node, 2, "value"), False)
    if _is(node, "where") and len(node.args) == 3:
        condition, yes, no = node.args
        fills = isinstance(yes, (int, float))
        above = _above(node, 2 if fills else 1, depth)
        return above and _filled(above, condition, yes if fills else no, not fills)
    return None


def _above(node: fx.Node, position: int, depth: int) -> Scores | None:
    inner = node.args[position]
    scores = _scores(inner, depth + 1)
    if scores is not None:
        _single_use(inner, node)
    return scores


def _either(node: fx.Node, depth: int, then: Any) -> Scores | None:
    """Returns `then(scores, other)` if one of the two operands leads to a product; None if neither does."""
    if len(node.args) != 2:
        return None
    for position in (0, 1):
        above = _above(node, position, depth)
        if above is not None:
            return then(above, node.args[1 - position])
    return None


def _scaled(scores: Scores, how: str, by: Any) -> Scores:
    if scores.biases or scores.blocked:
        raise NoMatch("its scores are scaled after masking")
    return replace(scores, scales=(*scores.scales, (how, by)))


def _biased(scores: Scores, by: Any) -> Scores:
    if not isinstance(by, fx.Node):
        raise NoMatch("a number is added to its scores")
    return replace(scores, biases=(*scores.biases, by))


def _filled(scores: Scores, condition: Any, value: Any, inverted: bool) -> Scores:
    if not isinstance(condition, fx.Node) or not isinstance(value, (int, float)):
        raise NoMatch("its mask fill value is not a constant")
    if value > _LARGEST_FILL:
        raise NoMatch(f"its mask is filled with {value:g}, which is not minus infinity")
    if scores.blocked and scores.fill != value:
        raise NoMatch("its masks are filled with different values")
    return replace(scores, blocked=(*scores.blocked, (condition, inverted)), fill=float(value))


def _transposes_last_two(node: Any) -> bool:
    if _is(node, "transpose", "swapaxes", "swapdims"):
        return set(node.args[1:]) == {-1, -2}
    if _is(node, "getattr"):
        return node.args[1] == "mT"
    if _is(node, "permute"):
        axes = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        count = len(axes)
        wanted = [*range(count - 2), count - 1, count - 2]
        return all(isinstance(a, int) for a in axes) and [a % count for a in axes] == wanted
    return False


def _dropout_probability(node: fx.Node, modules: dict[str, nn.Module]) -> float | None:
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.Identity):
            return 0.0
        return (module.p if module.training else 0.0) if isinstance(module, nn.Dropout) else None
    if not _is(node, "dropout"):
        return None
    p, training = _argument(node, 1, "p", 0.5), _argument(node, 2, "training", True)
    if not isinstance(p, (int, float)) or not isinstance(training, bool):
        raise NoMatch("its dropout probability is not a constant")
    return float(p) if training else 0.0


def _letters(node: fx.Node) -> tuple[str, str, str] | None:
    equation = node.args[0]
    if not isinstance(equation, str) or len(node.args) != 3 or "." in equation:
        return None
    left, arrow, output = equation.replace(" ", "").partition("->")
    first, comma, second = left.partition(",")
    return (first, second, output) if arrow and comma else None


def _einsum_scores(node: fx.Node) -> Scores | None:
    letters = _letters(node)
    first, second = node.args[1], node.args[2] if len(node.args) > 2 else None
    if letters is None or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if letters[2][-2:-1] in letters[0]:
        return Scores(node, first, second, False)
    return Scores(node, second, first, False)


def _with_einsum_values(node: fx.Node, weights: fx.Node, found: Match) -> Match:
    """Returns the match for two einsum products, with the permutation of each tensor to (batch…, length, width)."""
    ours, product = _letters(node), found.scores.product
    theirs = _letters(product) if _is(product, "einsum") else None
    if ours is None or theirs is None:
        raise NoMatch("it mixes einsum with other products")
    swapped = node.args[2] is weights
    weight_letters, value_letters = (ours[1], ours[0]) if swapped else (ours[0], ours[1])
    value = node.args[1] if swapped else node.args[2]
    query_letters, key_letters = theirs[:2] if product.args[1] is found.scores.query else theirs[1::-1]
    if not isinstance(value, fx.Node) or len(weight_letters) != len(theirs[2]):
        raise NoMatch("its einsum is not a product with the values")
    # The two equations may use different letters for the same axis. The attention weights occur in both equations, so
    # their axes show which letter of one equation corresponds to which letter of the other.
    names = dict(zip(weight_letters, theirs[2], strict=True))
    *batch, i, j = theirs[2]
    width = [a for a in query_letters if a not in theirs[2]]
    value_width = [a for a in value_letters if a not in names]
    value_axes = [names.get(a, "value " + a) for a in value_letters]
    output = [names.get(a, "value " + a) for a in ours[2]]
    try:
        (d,), (e,) = width, value_width
        axes = (
            tuple(query_letters.index(a) for a in [*batch, i, d]),
            tuple(key_letters.index(a) for a in [*batch, j, d]),
            tuple(value_axes.index(a) for a in [*batch, j, "value " + e]),
            tuple([*batch, i, "value " + e].index(a) for a in output),
        )
    except ValueError:
        raise NoMatch("its einsum is not a batched product of queries and keys") from None
    tensors = (query_letters, key_letters, value_letters, output)
    if any(sorted(a) != list(range(len(t))) for a, t in zip(axes, tensors, strict=True)):
        raise NoMatch("its einsum sums over more than the head dimension")
    return replace(found, value=value, einsum_axes=axes)


def _permuted(graph: fx.Graph, node: fx.Node, axes: tuple[int, ...]) -> fx.Node:
    return graph.call_method("permute", (node, *axes)) if axes != tuple(range(len(axes))) else node


def _folded(graph: fx.Graph, function: Callable[..., Any], values: Iterable[Any]) -> Any:
    """Returns a node that applies the binary function to the values from left to right; None without values."""
    nodes = iter(values)
    return functools.reduce(lambda total, one: graph.call_function(function, (total, one)), nodes, next(nodes, None))


def _scale(graph: fx.Graph, scores: Scores) -> Any:
    """Returns the product of the scales: a number if all of them are numbers, otherwise a node."""
    factor: Any = 1.0
    for how, by in scores.scales:
        function = operator.mul if how == "mul" else operator.truediv
        if isinstance(factor, fx.Node) or isinstance(by, fx.Node):
            factor = graph.call_function(function, (factor, by))
        else:
            factor = function(factor, by)
    return factor
