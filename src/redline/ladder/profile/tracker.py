"""Tracks which layer is running, in the forward pass and in the backward pass.

Forward pass: two global module hooks, which do not modify the model. Backward pass: autograd numbers its nodes in the
order of their creation, so the numbers at the start and at the end of a layer's forward pass identify its nodes. Hooks
before and after each node track its run in the backward pass. Module backward hooks are not used, because they break
models with in-place layers.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from redline.ladder.gate import tensors_of
from redline.ladder.profile.subject import Subject
from redline.ladder.workload import Inputs, LossFunction

FORWARD, BACKWARD = "forward", "backward"
# Names for the parts of a step outside of layers.
LOSS, OPTIMIZER, OUTSIDE = "(loss)", "(optimizer)", "(outside)"
# The name for the tracker's own work, which is not attributed to a layer.
WATCHING = "(watching)"


@dataclass(frozen=True)
class Place:
    """A running layer with its enclosing layers (outermost first), and the pass (forward or backward)."""

    path: tuple[str, ...]
    phase: str

    @property
    def layer(self) -> str:
        return self.path[-1] if self.path else OUTSIDE

    @property
    def label(self) -> str:
        """The name of the range in a trace."""
        name = self.layer or "model"
        return name if self.phase == FORWARD else f"{name} {self.phase}"


Watcher = Callable[[Place], object]


class Tracker:
    """A context manager around one step of the subject; calls `enter` and `leave` for each run of a layer."""

    def __init__(self, subject: Subject, enter: Watcher | None = None, leave: Watcher | None = None) -> None:
        self._subject = subject
        self._enter, self._leave = enter, leave
        self._names = {id(module): name for name, module in subject.layers.items()}
        self._owners = owner_paths(subject.layers)
        self._stack: list[Place] = []
        # The autograd sequence numbers at which the paths in `_paths` started.
        self._numbers: list[int] = []
        self._paths: list[tuple[str, ...]] = []
        self._handles: list[RemovableHandle] = []
        self._fast_path = True

    @property
    def current(self) -> Place:
        return self._stack[-1] if self._stack else Place((), _phase())

    @property
    def parents(self) -> set[str]:
        """The current layer, in the form in which torch's FLOP counter expects it from a module tracker."""
        # The prefix distinguishes names of layers from `Global`, which the counter uses for the total.
        return {"Global", f"layer:{self.current.layer}"}

    def __enter__(self) -> "Tracker":
        # The fast path of nn.TransformerEncoderLayer runs one kernel instead of calling the layers inside.
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._handles += [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]
        optimizer = self._subject.optimizer
        if optimizer is not None:
            self._handles += [
                optimizer.register_step_pre_hook(lambda *_: self._push(Place((OPTIMIZER,), FORWARD))),
                optimizer.register_step_post_hook(lambda *_: self._pop()),
            ]
        if self._subject.loss is not None:
            self._subject.loss.around = self._watch_loss
        return self

    def __exit__(self, *_: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._subject.loss is not None:
            self._subject.loss.around = None

    def _push(self, place: Place) -> None:
        self._stack.append(place)
        self._mark()
        if self._enter is not None:
            self._enter(place)

    def _pop(self) -> None:
        place = self._stack.pop()
        if self._leave is not None:
            self._leave(place)
        self._mark()

    def _mark(self) -> None:
        # Only the forward pass counts: the backward pass runs in another thread, which numbers its nodes separately.
        if _phase() == FORWARD:
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._paths.append(self._stack[-1].path if self._stack else ())

    def _before(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            # A forward pass during the backward pass recomputes activations, so its cost belongs to the backward pass.
            around = self.current.path
            # Recomputation can enter an outer layer again during the backward pass of an inner layer.
            outer = around[: around.index(name)] if name in around else around
            self._push(Place((*outer, name), _phase()))

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if id(module) in self._names and self._stack:
            self._pop()

    def _watch_loss(self, loss: LossFunction, output: Any, batch: Inputs) -> Tensor:
        self._push(Place((LOSS,), FORWARD))
        value = loss(output, batch)
        self._pop()
        self._push(Place((WATCHING,), FORWARD))
        for node in _nodes(value):
            place = Place(self._path_of(node), BACKWARD)
            self._handles += [
                node.register_prehook(lambda *_, place=place: self._push(place)),
                node.register_hook(lambda *_: self._pop()),
            ]
        self._pop()
        return value

    def _path_of(self, node: Any) -> tuple[str, ...]:
        variable = getattr(node, "variable", None)  # an AccumulateGrad node, which adds to the gradient of a parameter
        if variable is not None:
            return self._owners.get(id(variable), ())
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[index] if index >= 0 else ()


def _phase() -> str:
    return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD


def _nodes(value: Any) -> Iterator[Any]:
    """Yields every autograd node of a loss."""
    waiting = [tensor.grad_fn for tensor in tensors_of(value)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        yield node


def owner_paths(layers: dict[str, nn.Module]) -> dict[int, tuple[str, ...]]:
    """Returns, by the id of each parameter, the layers that contain it: ("", "a", "a.b") for a parameter of `a.b`."""
    owners: dict[int, tuple[str, ...]] = {}
    for name, module in layers.items():
        parts = name.split(".")
        outer = dict.fromkeys(["", *(".".join(parts[: i + 1]) for i in range(len(parts)))])
        path = tuple(known for known in outer if known in layers)
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), path)
    return owners
