"""Shared fixtures of the tests of ops: poisoned memory, comparison with fp64 references, simulated GPUs, compilers."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

from redline.ops.window_attention import constant

from .faster_interpreter import patch_interpreter

# If kernels can neither run nor be interpreted, their tests are not collected, unless they are named explicitly.
_KERNELS_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if _KERNELS_RUN else ["*/test_triton.py", "*/test_gpu.py"]

# The allowed relative error of a tensor in units of the machine epsilon of its dtype.
ROUNDINGS = {torch.float64: 64, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
# Tensor cores compute fp32 products as three TF32 products, and round sums down.
ROUNDINGS_ON_TENSOR_CORES = {**ROUNDINGS, torch.float32: 128}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new tensors with NaN, so that elements that a kernel does not write are detected."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: object, **kwargs: object) -> Tensor:
            tensor = allocate(*args, **kwargs)
            with torch.no_grad():  # compilers create tensors that require grad
                return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    # torch caches a list of tensor constructors, which must be built before they are replaced.
    _device_constructors()
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Compares an implementation's outputs and all gradients with a reference in fp64, tensor by tensor.

    Where large terms cancel, the allowed error is the same multiple of what a relative change of the inputs by the
    machine epsilon causes.
    """

    def check(
        implementation: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: Sequence[Tensor],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        roundings: float | None = None,
    ) -> None:
        given = [_as(tensor, device, dtype) for tensor in inputs]
        exact = [_as(tensor.detach(), device, torch.float64) for tensor in given]
        found, expected = _with_gradients(implementation, given, exact), _with_gradients(reference, exact, exact)
        if roundings is None:
            roundings = (ROUNDINGS_ON_TENSOR_CORES if device == "cuda" else ROUNDINGS)[dtype]
        limit = roundings * torch.finfo(dtype).eps
        # A gradient of exactly zero is a difference of sums that are as large as the other gradients.
        largest = max((one.norm() for name, one in expected.items() if name.startswith("gradient")), default=0.0)
        for name, one in expected.items():
            other = found[name].double()
            assert other.shape == one.shape, name
            size = one.norm() if one.any() or name.startswith("output") else torch.as_tensor(largest)
            error = ((other - one).norm() / size.clamp_min(1e-30)).item()
            allowed = limit
            if limit < error < torch.inf:
                moved = max((shaken[name] - one).norm().item() for shaken in _shaken(reference, exact, dtype))
                allowed = max(limit, roundings * moved / size.clamp_min(1e-30).item())
            assert error <= allowed, f"{name} is off by {error:.2e}, and {allowed:.2e} would be rounding"

    return check


def _shaken(reference: Callable[..., Any], exact: list[Tensor], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yields the results for inputs with random relative errors of the machine epsilon of the dtype."""
    digit = torch.finfo(dtype).eps
    for _ in range(8):
        inputs = [
            (one.detach() * (1 + digit * (2 * torch.rand_like(one) - 1))).requires_grad_() if one.requires_grad else one
            for one in exact
        ]
        yield _with_gradients(reference, inputs, exact)


def _as(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.to(device)
    return tensor.to(device, dtype).detach().requires_grad_()


def _with_gradients(function: Callable[..., Any], inputs: list[Tensor], exact: list[Tensor]) -> dict[str, Tensor]:
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [one for one in outputs if one is not None]
    named = {f"output {index}": one.detach() for index, one in enumerate(outputs)}
    trained = [index for index, one in enumerate(inputs) if one.requires_grad]
    # Both sides use the same weights, whatever their dtype.
    device = outputs[0].device
    generator = torch.Generator(device).manual_seed(len(exact))
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for one in outputs:
        if one.requires_grad:
            weights = torch.randn(one.shape, generator=generator, dtype=torch.float64, device=device)
            loss = loss + (one.double() * weights).sum()
    gradients = torch.autograd.grad(loss, [inputs[index] for index in trained])
    return named | {f"gradient {index}": one for index, one in zip(trained, gradients, strict=True)}


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            patch_interpreter(patch)
        yield


@dataclass(frozen=True)
class Card:
    """The device properties that host code reads, with the smallest values of GPUs of a compute capability."""

    processors: int
    shared_bytes: int


CARDS = {
    80: Card(108, 166_912),
    86: Card(82, 101_376),
    89: Card(128, 101_376),
    90: Card(132, 232_448),
    120: Card(170, 101_376),
}


class _Driver:
    """A Triton driver for a GPU that is not present: kernels can be compiled for it, but not launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0


class _AsOnCuda(TorchFunctionMode):
    """Tensors report a CUDA device, and new tensors for that device are created on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.is_cuda.__get__:
            return True
        if function == Tensor.device.__get__:
            return torch.device("cuda:0")
        args, kwargs = tree_map(lambda one: "cpu" if isinstance(one, torch.device) else one, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Triton cache folder that all test processes share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton"


@pytest.fixture
def on_card(
    monkeypatch: pytest.MonkeyPatch, triton_cache: Path
) -> Callable[..., AbstractContextManager[dict[str, Any]]]:
    """`with on_card(90) as launched:` runs host code as on a GPU of that compute capability, which need not be present.

    `launched` receives the names of the kernels that would run. Nothing is computed: outputs stay NaN. With `compiling`
    the kernels are compiled for the GPU through ptxas, specialized by the arguments of the launch, and are the values
    of `launched`.
    """
    kernel = pytest.importorskip("redline.ops.kernel")
    if kernel.INTERPRETED:
        pytest.skip("nothing is compiled when interpreted")
    from triton.runtime import JITFunction, driver

    @contextmanager
    def entered(capability: int, compiling: bool = False) -> Iterator[dict[str, Any]]:
        launched: dict[str, Any] = {}
        run, card = JITFunction.run, CARDS.get(capability, CARDS[80])

        def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
            launched[self.__name__] = None
            if compiling:
                found = launched[self.__name__] = run(self, *arguments, grid=grid, warmup=True, **constants)
                shared = found.metadata.shared
                assert found.asm["cubin"] and shared <= card.shared_bytes, f"{self.__name__} takes {shared} bytes"

        with monkeypatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(triton_cache))
            patch.setattr(JITFunction, "run", compile_only)
            patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
            patch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))
            # Constants that are created here must not be cached for a real device.
            patch.setattr(constant, "_is_faking", lambda: True)
            patch.setattr(kernel, "processors", lambda _: card.processors)
            patch.setattr(kernel, "shared_bytes", lambda _: card.shared_bytes)
            patch.setattr(kernel, "has_descriptors", lambda _: capability >= 90)
            patch.setattr(driver, "_active", _Driver(capability))
            with _AsOnCuda():
                yield launched

    return entered


@pytest.fixture
def compiled_agrees() -> Callable[..., None]:
    """Compiles a function without graph breaks, on a GPU by inductor, and compares outputs and gradients with eager."""

    def check(function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        backend = "inductor" if inputs[0].is_cuda else "aot_eager"
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        found, expected = _with_gradients(compiled, list(inputs), []), _with_gradients(function, list(inputs), [])
        for name, one in expected.items():
            # Fused operations do not round intermediate values.
            limit = 2 * ROUNDINGS[one.dtype] * torch.finfo(one.dtype).eps
            assert (found[name].double() - one.double()).norm() <= limit * one.double().norm(), name

    return check


@pytest.fixture
def repeats() -> Callable[..., None]:
    """Checks that outputs and gradients are bit-identical across calls and CUDA graph replays."""

    def check(function: Callable[..., Any], inputs: list[Tensor]) -> None:
        first = _with_gradients(function, inputs, [])
        for _ in range(3):
            _assert_same_bits(_with_gradients(function, inputs, []), first)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _outputs_and_grads(function, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = _outputs_and_grads(function, inputs)
        with torch.no_grad():
            for one in inputs:
                if one.is_floating_point():
                    one.normal_()
        graph.replay()
        expected = _outputs_and_grads(function, inputs)
        _assert_same_bits(dict(enumerate(replayed)), dict(enumerate(expected)))

    return check


def _outputs_and_grads(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Returns outputs and gradients for deterministic gradients of the outputs that are computed on the device."""
    outputs = function(*inputs)
    outputs = [one for one in ([outputs] if isinstance(outputs, Tensor) else outputs) if one is not None]
    trained = [one for one in inputs if one.requires_grad]
    grads = [torch.linspace(-1, 1, one.numel(), device=one.device).view(one.shape).to(one.dtype) for one in outputs]
    gradients = torch.autograd.grad(outputs, trained, grads)
    # With their history they would keep gradient accumulators alive, which are bound to the stream of this call.
    return [*(one.detach() for one in outputs), *gradients]


def _assert_same_bits(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    for name, one in expected.items():
        assert torch.equal(found[name], one), name
