"""Captures a function into one CUDA graph per input signature, and replays that graph on later calls.

Each call copies its inputs into static buffers, replays the graph and copies the outputs out, so a caller may keep a
result or feed it back. A training step is captured together with its optimizer; the state that warm-up steps change
is restored.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from redline.errors import RungError, first_line
from redline.machine.trees import tree_leaves, tree_map_only


class GraphCapturer(Protocol):
    """Captures and replays graphs. Tests substitute an implementation that needs no GPU."""

    def supports(self, tensors: list[Tensor]) -> bool: ...
    def warm_up(self, run: Callable[[], Any]) -> Any: ...
    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]: ...
    def pool_bytes(self) -> int: ...


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: destroying an unreferenced CUDA graph would abort a capture in progress."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def private_cublas_workspaces() -> Iterator[None]:
    """Allocates the cuBLAS workspaces of a capture from the graph's own memory pool, which lives as long as the graph.

    A workspace that was allocated before the capture is freed when inductor captures or destroys another graph, and a
    replay would then overwrite other tensors (pytorch/pytorch#193402). A workspace that is left allocated after the
    capture would keep the pool alive.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaGraphCapturer:
    """Captures on its own stream. All its graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def supports(self, tensors: list[Tensor]) -> bool:
        return all(tensor.device == self.device for tensor in tensors)

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Runs the function on the capture stream, where lazily created objects such as workspaces must be created."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = run()
        current.wait_stream(self.stream)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        return output

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Weights that autocast has cast and cached are allocated outside the pool and would be freed before the replay.
        torch.clear_autocast_cache()
        # In mode "thread_local" the capture restricts only this thread, so that data loader threads can keep copying.
        try:
            with (
                no_garbage_collection(),
                private_cublas_workspaces(),
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                output = run()
        except RuntimeError:
            self._release_generator()
            raise
        return output, graph.replay

    def _release_generator(self) -> None:
        """Replaces the state of the default generator, which a failed capture leaves registered with the graph.

        Without this, every later random operation would raise.
        """
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
        fresh = torch.Generator(device=self.device)
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self.pool))


@dataclass
class CaptureCounts:
    """Counts captures, replays and calls without a graph. The `cuda_graph` rung reports them as its proof."""

    graphs: int = 0
    replays: int = 0
    uncaptured: int = 0
    capturers: list[GraphCapturer] = field(default_factory=list)


@dataclass
class _CapturedGraph:
    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]
    gradients: list[tuple[nn.Parameter, Tensor | None]]


@dataclass(eq=False)
class GraphedCallable:
    """Calls a function through CUDA graphs, one for each input signature, up to `limit`.

    With `clone`, outputs are copied out of graph memory; otherwise the next call overwrites them. With `state`, the
    function is a training step: its first call runs without a graph and counts as a real step.
    """

    function: Callable[..., Any]
    capturer: GraphCapturer
    counts: CaptureCounts
    _: KW_ONLY
    clone: bool = True
    limit: int = 8
    warmup_calls: int = 3
    state: "TrainingState | None" = None
    graphs: dict[Any, _CapturedGraph] = field(default_factory=dict, init=False)
    last: _CapturedGraph | None = field(default=None, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Tensor] = []
        signature: Any = [_signature(a, leaves) for a in args]
        if kwargs:
            signature.append(_signature(kwargs, leaves))
        if self.state is not None:
            signature.append(self.state.settings())
        signature = tuple(signature)
        captured = self.graphs.get(signature)
        if captured is None:
            if len(self.graphs) >= self.limit:
                return self._call_without_graph(args, kwargs)
            captured, real_output = self._capture(args, kwargs, leaves)
            self.graphs[signature] = captured
            if self.state is not None:
                return real_output
        for buffer, leaf in zip(captured.inputs, leaves, strict=True):
            if buffer is not leaf:
                buffer.copy_(leaf, non_blocking=True)
        if captured is not self.last:
            for parameter, gradient in captured.gradients:
                parameter.grad = gradient
            self.last = captured
        captured.replay()
        self.counts.replays += 1
        return tree_map_only(Tensor, Tensor.clone, captured.output) if self.clone else captured.output

    def _call_without_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.counts.uncaptured:
            warnings.warn(
                f"cuda_graph: {self.limit} input signatures are captured (limit={self.limit}), and other inputs run "
                "without a graph. Raise limit=, or pad the inputs to fewer shapes.",
                stacklevel=3,
            )
        self.counts.uncaptured += 1
        self.last = None
        return self.function(*args, **kwargs)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
    ) -> tuple[_CapturedGraph, Any]:
        """Captures and returns the graph of this signature and, for training, the output of the real step before it."""
        if not self.capturer.supports(leaves):
            raise RungError(
                "cuda_graph: an input tensor is in host memory, which a CUDA graph cannot read. Move it to the GPU."
            )

        def warm_up() -> Any:
            return self.capturer.warm_up(lambda: self.function(*args, **kwargs))

        if self.state is None:
            for _ in range(self.warmup_calls):
                warm_up()
            buffers, output, replay = self._capture_into_buffers(args, kwargs, leaves)
            real_output, gradients = None, []
        else:
            real_output = warm_up()
            with self.state.restored_on_exit():
                for _ in range(self.warmup_calls - 1):
                    warm_up()
                buffers, output, replay = self._capture_into_buffers(args, kwargs, leaves)
            gradients = self.state.gradients()
        self.counts.graphs += 1
        self.last = _CapturedGraph(buffers, output, replay, gradients)
        return self.last, real_output

    def _capture_into_buffers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any, Callable[[], None]]:
        def run() -> tuple[list[Tensor], Any]:
            # Buffers that are allocated during the capture belong to the graph's memory pool.
            buffers = [torch.empty_like(leaf) for leaf in leaves]
            own_args, own_kwargs = _replace_tensors((args, kwargs), iter(buffers))
            return buffers, self.function(*own_args, **own_kwargs)

        try:
            (buffers, output), replay = self.capturer.capture(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RungError(f"cuda_graph: the call cannot be captured: {first_line(error)}.") from error
        return buffers, output, replay


class TrainingState:
    """The state that a training step changes: it can be saved and restored in place."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def settings(self) -> tuple[Any, ...]:
        """Returns the optimizer settings that a graph captures as constants, such as a float learning rate."""
        return tuple(
            tuple(value for key, value in group.items() if key != "params" and not isinstance(value, Tensor))
            for group in self.optimizer.param_groups
        )

    def gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        return [(p, p.grad) for p in self.model.parameters() if p.requires_grad]

    @contextmanager
    def restored_on_exit(self) -> Iterator[None]:
        """Restores weights, buffers, optimizer state, gradients and random state when the block ends."""
        states = self.optimizer.state.values()
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
        numbers = [(state, {k: v for k, v in state.items() if not isinstance(v, Tensor)}) for state in states]
        gradients = [(p, None if g is None else g.clone()) for p, g in self.gradients()]
        random = [(d, torch.cuda.get_rng_state(d)) for d in {t.device for t in tensors if t.is_cuda}]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in saved:
                    tensor.copy_(before)
                # The graph's gradient buffers hold no values before a replay, so they get the real step's gradients.
                for parameter, before in gradients:
                    if parameter.grad is not None and before is not None:
                        parameter.grad.copy_(before)
            for state, before in numbers:
                state.update(before)
            for device, before in random:
                torch.cuda.set_rng_state(before, device)


def _signature(value: Any, leaves: list[Tensor]) -> Any:
    """Returns a hashable key that selects the graph for `value`, and appends the tensors of `value` to `leaves`."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple((key, _signature(item, leaves)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_signature(item, leaves) for item in value])
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        raise RungError(
            f"cuda_graph: an input of type {kind} is not hashable, so no graph can be chosen by it."
        ) from None
    return type(value), value


def _replace_tensors(value: Any, supply: Iterator[Tensor]) -> Any:
    """Returns `value` with its tensors replaced by those of `supply`, in the order of `_signature`."""
    if isinstance(value, Tensor):
        return next(supply)
    if isinstance(value, dict):
        return {key: _replace_tensors(item, supply) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replace_tensors(item, supply) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([_replace_tensors(item, supply) for item in value])
    return value
