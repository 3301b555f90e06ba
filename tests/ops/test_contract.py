"""The contract of every op: registered, runs Triton if supported, otherwise falls back with a reason, and compiles.

`<op>/test_triton.py` compares the kernels with the reference, interpreted or on a GPU.
"""

import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import redline.ops
from redline.errors import MachineError, ModelError
from redline.ops import dispatch
from redline.ops.causal_attention import causal_attention

from .registry import OPS, Op, Sizes

CAPABILITIES = (80, 86, 89, 90, 120)
TESTS = Path(__file__).parent
OnCard = Callable[..., Any]

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def test_every_op_is_registered_and_has_its_own_tests() -> None:
    packages = sorted(path.parent.name for path in Path(redline.ops.__file__).parent.glob("*/__init__.py"))
    found = []
    for package in packages:
        module = import_module(f"redline.ops.{package}")
        own = [one for one in vars(module).values() if inspect.isfunction(one) and _is_in(one.__module__, package)]
        chosen = [one.__name__ for one in own if "implementation" in inspect.signature(one).parameters]
        assert chosen, f"{package} has no operator that takes an implementation"
        found += chosen
        for file in ("test_reference.py", "test_triton.py"):
            assert (TESTS / package / file).exists(), f"{package} has no {file}"
    assert sorted(found) == sorted(op.name for op in OPS)
    assert set(SIZES) == set(found)


def _is_in(module: str, package: str) -> bool:
    return module.split(".")[:3] == ["redline", "ops", package]


def run(op: Op, given: dict[str, Any], implementation: str = "auto") -> list[Tensor]:
    """Calls the op without gradients and returns its outputs and arguments, some of which it may have written."""
    given = tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, given)
    with torch.no_grad():
        found = op.function(**given, implementation=implementation)
    return [one for one in tree_leaves((found, given)) if isinstance(one, Tensor)]


@every_op
def test_a_supported_gpu_runs_triton(op: Op, on_card: OnCard) -> None:
    for sizes in op.sizes:
        given = op.sample(torch.bfloat16, **sizes)
        expected = run(op, given, "reference")
        with on_card(80) as launched:
            found = run(op, given, "triton")
        assert launched, sizes
        assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]
    with on_card(80) as launched:
        run(op, op.sample(torch.bfloat16, **op.sizes[0]))
    assert launched, "auto does not take Triton"


@every_op
def test_a_gpu_below_8_0_falls_back_with_a_warning(op: Op, on_card: OnCard) -> None:
    given = op.sample(torch.bfloat16, **op.sizes[0])
    reason = "compute capability 8.0 is required, and this device has 7.5"
    with on_card(75) as launched:
        with pytest.warns(UserWarning, match=f"falling back to plain PyTorch, .*: {reason}"):
            run(op, given)
        with pytest.raises(MachineError, match=f"the Triton kernels cannot run: {reason}"):
            run(op, given, "triton")
    assert not launched


@every_op
def test_a_cpu_runs_the_reference_without_a_warning(op: Op) -> None:
    given = op.sample(torch.float32, **op.sizes[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(op, given)
    for one, other in zip(found, run(op, given, "reference"), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@every_op
def test_unavailable_implementations_are_refused(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    given = op.sample(torch.float32, **op.sizes[0])
    with pytest.raises(ModelError, match="unknown implementation 'cuda' .supported: auto, reference, .*triton"):
        run(op, given, "cuda")
    if not pytest.importorskip("redline.ops.kernel").INTERPRETED:
        with pytest.raises(
            MachineError, match="Triton kernels cannot run: a CUDA device is required, and the input is on cpu"
        ):
            run(op, given, "triton")
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    with pytest.raises(MachineError, match="Triton kernels cannot run: Triton is not installed .pip install triton"):
        run(op, given, "triton")


def run_forward_and_backward(op: Op, dtype: torch.dtype, sizes: Sizes) -> None:
    def as_parameter(one: object) -> object:
        trained = isinstance(one, Tensor) and one.is_floating_point()
        return one.detach().requires_grad_() if trained else one

    given = op.sample(dtype, **sizes)
    given |= {name: tree_map(as_parameter, given[name]) for name in op.trained if name in given}
    with torch.set_grad_enabled(bool(op.trained)):
        found = op.function(**given, implementation="triton")
        outputs = [one for one in tree_leaves(found) if isinstance(one, Tensor) and one.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    assert bool(outputs) == bool(op.trained)


def kernels_of(package: str) -> set[str]:
    """Returns the names of the kernels that the package defines."""
    found = set()
    for path in (Path(redline.ops.__file__).parent / package).glob("triton*.py"):
        module = import_module(f"redline.ops.{package}.{path.stem}")
        found |= {
            name
            for name, one in vars(module).items()
            if name.endswith("_kernel") and package in one.__module__.split(".")
        }
    return found


@pytest.mark.parametrize("package", sorted({op.function.__module__.split(".")[2] for op in OPS}))
def test_samples_launch_all_kernels(package: str, on_card: OnCard) -> None:
    found = set()
    for op in OPS:
        for sizes in op.sizes if op.function.__module__ == f"redline.ops.{package}" else ():
            for capability in (80, 90):
                with on_card(capability) as launched:
                    run_forward_and_backward(op, torch.bfloat16, sizes)
                found |= set(launched)
    assert found and kernels_of(package) <= found


# Compiling takes long: `make test` compiles each op for 9.0, whose kernels differ most, and the kernels of its forward
# pass for one other capability, in turn; `make test-all` compiles all kernels for all of them.
IN_TURN = [capability for capability in CAPABILITIES if capability != 90]


def name_of(value: object) -> str:
    return str(getattr(value, "name", value))


def sizes_to_compile(op: Op) -> tuple[Sizes, ...]:
    # The kernels of causal attention with far keys take three times as long: `make test-all` compiles them.
    return ({"dim": 16},) if op.function is causal_attention else op.sizes


@pytest.mark.parametrize(
    ("op", "capability"),
    [
        pytest.param(op, capability, marks=() if capability == 90 else pytest.mark.slow)
        for op in OPS
        for capability in CAPABILITIES
    ],
    ids=name_of,
)
def test_kernels_compile(op: Op, capability: int, on_card: OnCard) -> None:
    for sizes in sizes_to_compile(op):
        with on_card(capability, compiling=True) as launched:
            run_forward_and_backward(op, torch.bfloat16, sizes)
        assert launched


@pytest.mark.parametrize(
    ("op", "capability"), [(op, IN_TURN[place % len(IN_TURN)]) for place, op in enumerate(OPS)], ids=name_of
)
def test_forward_kernels_compile(op: Op, capability: int, on_card: OnCard) -> None:
    for sizes in sizes_to_compile(op):
        with on_card(capability, compiling=True) as launched:
            run(op, op.sample(torch.bfloat16, **sizes), "triton")
        assert launched


def each(name: str, *values: object) -> list[Sizes]:
    return [{name: value} for value in values]


# The sizes of models, and the extreme sizes that the kernels support.
SIZES: dict[str, list[Sizes]] = {
    "causal_attention": [{"dim": dim, "with_far": far} for dim in (16, 32, 64, 128) for far in (False, True)],
    "convolved_heads": [
        {"key_dim": keys, "value_dim": values, "taps": taps, "packed": packed}
        for keys, values, taps in ((64, 128, 4), (96, 96, 1), (5, 7, 3), (256, 256, 4), (16, 16, 16))
        for packed in (False, True)
    ],
    "cross_entropy": each("smoothing", 0.0, 0.1),
    "fused_linear": [
        {"columns": columns, "with_epilogue": around} for columns in (32, 64, 312) for around in (False, True)
    ],
    "fused_mlp": [{"channels": c, "columns": n} for c, n in ((184, 32), (248, 32), (280, 32), (312, 32), (312, 184))],
    "gated_delta_rule": [
        *({"keys": keys, "values": values} for keys, values in ((64, 64), (128, 128), (96, 96), (16, 256), (256, 32))),
        *({"chunk": chunk, "packed": False} for chunk in (16, 32, 64)),
        {"batch": 22, "heads": 12, "tokens": 65},  # enough programs for wide tiles
    ],
    "int8_matmul": each("rows", 8, 32, 64, 600),
    "weight_only_matmul": each("rows", 1, 8, 32, 600),
    "layer_norm_dropout_relu": each("width", 1, 37, 64, 128, 200, 512, 2048, 5000, 8192, 65536),
    "linear_cross_entropy": each("reduction", "mean", "none"),
    "memory_step": [{}, {"keys": 128, "values": 256}],
    "paged_attention": [{"dim": dim, "width": width} for dim in (64, 128) for width in (3, 90)],
    "rms_norm": each("width", 1, 37, 64, 128, 200, 512, 2048, 5000, 8192, 16384, 65536),
    "add_rms_norm": each("width", 1, 200, 768, 4096),
    "rope": [{"heads": h, "shared": k, "dim": d} for h, k, d in ((12, 12, 64), (128, 8, 128), (3, 1, 6), (1, 1, 1024))],
    "sample": each("columns", 3, 128_256),
    "slot_write": [{}],
    "small_matmul": each("rows", 1, 8),
    "swiglu": [{}],
    "packed_swiglu": [{}],
    "titans_memory": [
        *({"keys": keys, "values": values} for keys, values in ((64, 64), (128, 128), (96, 32))),
        *({"chunk": chunk, "split": False} for chunk in (16, 32, 64)),
    ],
    "window_attention": [
        *({"head_dim": dim, "heads": heads} for dim, heads in ((30, 6), (53, 4), (122, 2), (46, 6), (77, 4), (16, 1))),
        *({"head_dim": 46, "heads": 2, "window": window, "shift": 2} for window in (4, 8, 32)),
    ],
    "window_attention_expanded": [{"head_dim": dim, "heads": 4} for dim in (30, 48, 80, 96)],
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@every_op
def test_kernels_compile_at_every_size(op: Op, dtype: torch.dtype, capability: int, on_card: OnCard) -> None:
    for sizes in SIZES[op.name]:
        with on_card(capability, compiling=True) as launched:
            run_forward_and_backward(op, dtype, sizes)
        assert launched
