"""A function whose GPU work is recorded once per form of input, and replayed from then on.

Inputs are copied into static buffers, the recording is replayed, outputs are copied out, so that a result may
be kept or fed back. A training step is recorded with its optimizer: what the rehearsals change is put back.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.errors import RungError


class Recorder(Protocol):
    """What records and replays; the tests put one in its place that needs no GPU."""

    def reaches(self, tensors: list[Tensor]) -> bool: ...
    def rehearse(self, run: Callable[[], Any]) -> Any: ...
    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]: ...
    def pool_bytes(self) -> int: ...


@contextmanager
def without_collection() -> Iterator[None]:
    """A graph that nobody needs any more must not be found now: taking it down breaks off the recording under way."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """cuBLAS' scratch memory is taken from a recording's own pool, which lives as long as the recording.

    Taken before, it is one that torch drops whenever another graph is recorded by inductor or taken down: a replay
    then writes where others' tensors are by now (pytorch/pytorch#193402). Left behind, it would keep the pool alive.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaRecorder:
    """Records on a stream of its own into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def reaches(self, tensors: list[Tensor]) -> bool:
        return all(tensor.device == self.device for tensor in tensors)

    def rehearse(self, run: Callable[[], Any]) -> Any:
        """Runs once on the recording stream, where lazily made things (work spaces, states) must be made."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = run()
        current.wait_stream(self.stream)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        return output

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Casts that autocast remembers live outside of the graph, and would be gone at the replay.
        torch.clear_autocast_cache()
        # Only this thread is held to what may be recorded: a data loader's threads may go on with
        # their copies.
        try:
            with (
                without_collection(),
                own_workspaces(),
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                output = run()
        except RuntimeError:
            self._release_generator()
            raise
        return output, graph.replay

    def _release_generator(self) -> None:
        """A recording that fails leaves torch's random generator waiting for its end: every later draw would raise."""
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
        fresh = torch.Generator(device=self.device)
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    def pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self.pool))


@dataclass
class Tally:
    """What happened, for the proof."""

    graphs: int = 0
    replays: int = 0
    unrecorded: int = 0
    recorders: list[Recorder] = field(default_factory=list)


@dataclass
class _Recording:
    inputs: list[Tensor]
    output: Any
    replay: Callable[[], None]
    gradients: list[tuple[nn.Parameter, Tensor | None]]


class GraphedCallable:
    """Called like the function it records."""

    def __init__(
        self,
        function: Callable[..., Any],
        recorder: Recorder,
        tally: Tally,
        *,
        clone: bool = True,
        limit: int = 8,
        rehearsals: int = 3,
        state: "TrainingState | None" = None,
    ) -> None:
        self.function = function
        self.recorder = recorder
        self.tally = tally
        self.clone = clone
        self.limit = limit
        self.rehearsals = rehearsals
        self.state = state
        self.recordings: dict[Any, _Recording] = {}
        self.last: _Recording | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Tensor] = []
        form: Any = [_form(a, leaves) for a in args]
        if kwargs:
            form.append(_form(kwargs, leaves))
        if self.state is not None:
            form.append(self.state.settings())
        form = tuple(form)
        recording = self.recordings.get(form)
        if recording is None:
            if len(self.recordings) >= self.limit:
                return self._unrecorded(args, kwargs)
            recording, real_output = self._record(args, kwargs, leaves)
            self.recordings[form] = recording
            if self.state is not None:
                return real_output
        for buffer, leaf in zip(recording.inputs, leaves, strict=True):
            if buffer is not leaf:
                buffer.copy_(leaf, non_blocking=True)
        if recording is not self.last:
            self._switch_to(recording)
        recording.replay()
        self.tally.replays += 1
        return _copied(recording.output) if self.clone else recording.output

    def _unrecorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.tally.unrecorded:
            warnings.warn(
                f"cuda_graph: {self.limit} forms of input are recorded, so others run without a graph "
                "(raise limit=, or feed fewer shapes).",
                stacklevel=3,
            )
        self.tally.unrecorded += 1
        self.last = None
        return self.function(*args, **kwargs)

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]) -> tuple[_Recording, Any]:
        """A recording for inputs of this form; for training also the output of the one step that counts."""
        if not self.recorder.reaches(leaves):
            raise RungError(
                "cuda_graph: an input lies in host memory, which a graph cannot follow: move it to the GPU."
            )

        def rehearse() -> Any:
            return self.recorder.rehearse(lambda: self.function(*args, **kwargs))

        if self.state is None:
            for _ in range(self.rehearsals):
                rehearse()
            buffers, output, replay = self._record_static(args, kwargs, leaves)
            real_output, gradients = None, []
        else:
            real_output = rehearse()
            with self.state.kept():
                for _ in range(self.rehearsals - 1):
                    rehearse()
                buffers, output, replay = self._record_static(args, kwargs, leaves)
            gradients = self.state.gradients()
        self.tally.graphs += 1
        self.last = _Recording(buffers, output, replay, gradients)
        return self.last, real_output

    def _record_static(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
    ) -> tuple[list[Tensor], Any, Callable[[], None]]:
        def run() -> tuple[list[Tensor], Any]:
            # Made inside of the recording, the buffers come out of its pool.
            buffers = [torch.empty_like(leaf) for leaf in leaves]
            own_args, own_kwargs = _rebuilt((args, kwargs), iter(buffers))
            return buffers, self.function(*own_args, **own_kwargs)

        try:
            (buffers, output), replay = self.recorder.record(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            text = str(error).strip().splitlines() or ["no message"]
            raise RungError(f"cuda_graph: the call cannot be recorded: {text[0].rstrip('.')}.") from error
        return buffers, output, replay

    def _switch_to(self, recording: _Recording) -> None:
        for parameter, gradient in recording.gradients:
            parameter.grad = gradient
        self.last = recording


class TrainingState:
    """Everything that a training step changes: it can be put back into the same memory."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def settings(self) -> tuple[Any, ...]:
        """Numbers that a recording bakes in, such as a learning rate that is no tensor."""
        return tuple(
            tuple(value for key, value in group.items() if key != "params" and not isinstance(value, Tensor))
            for group in self.optimizer.param_groups
        )

    def gradients(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        return [(p, p.grad) for p in self.model.parameters() if p.requires_grad]

    def kept(self) -> "_Kept":
        return _Kept(self)


class _Kept:
    """Notes weights, buffers, optimizer state, gradients and random state, and restores them at the end."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state

    def __enter__(self) -> None:
        model, optimizer = self.state.model, self.state.optimizer
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        self.tensors = [(t, t.detach().clone()) for t in tensors]
        self.numbers = [
            (values, {k: v for k, v in values.items() if not isinstance(v, Tensor)})
            for values in optimizer.state.values()
        ]
        self.gradients = [(p, None if g is None else g.clone()) for p, g in self.state.gradients()]
        devices = {t.device for t, _ in self.tensors if t.is_cuda}
        self.random = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for tensor, before in self.tensors:
                tensor.copy_(before)
            # The recording's own gradients have not been computed yet; they show the real
            # step's until they are.
            for parameter, before in self.gradients:
                if parameter.grad is not None and before is not None:
                    parameter.grad.copy_(before)
        for values, before in self.numbers:
            values.update(before)
        for device, before in self.random:
            torch.cuda.set_rng_state(before, device)


def _form(value: Any, leaves: list[Tensor]) -> Any:
    """What a recording is specialized to; collects the tensors on the way."""
    if isinstance(value, Tensor):
        leaves.append(value)
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple((key, _form(item, leaves)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_form(item, leaves) for item in value])
    try:
        hash(value)
    except TypeError:
        raise RungError(f"cuda_graph: an input is a {type(value).__name__}, which cannot be told apart.") from None
    return type(value), value


def _rebuilt(value: Any, supply: Iterator[Tensor]) -> Any:
    """The same nest with its tensors replaced, in the order in which `_form` collects them."""
    if isinstance(value, Tensor):
        return next(supply)
    if isinstance(value, dict):
        return {key: _rebuilt(item, supply) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuilt(item, supply) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([_rebuilt(item, supply) for item in value])
    return value


def _copied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)
