"""Measures the ceilings of a device: the bytes/s of a copy, and the FLOP/s of matmul and convolution in each dtype."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.machine.cpu_features import cpu_limit
from redline.machine.load import current_load
from redline.machine.machine import Ceilings, Machine

# The minimum and maximum number of rounds. Rounds after the third run only while the best three rates of a dtype differ
# by more than the share `_UNSTEADY`. Each round measures all dtypes, so that a busy moment does not make only one dtype
# look slow.
_ROUNDS, _MOST_ROUNDS, _UNSTEADY = 3, 6, 0.15
# No round starts after `_LONGEST_S`. Only the first round measures a dtype below `_SLOW_SHARE` of the fp32 rate.
_LONGEST_S, _SLOW_SHARE = 6.0, 0.05
# Ceilings whose rounds differed are measured again after this time, not by every command.
_AGAIN_AFTER_S = 3600.0
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def with_ceilings(machine: Machine, again: bool = False) -> Machine:
    """Returns the machine with its ceilings; measures them unless the cached ceilings are still plausible.

    While other processes use the machine, cached ceilings are kept.
    """
    if machine.ceilings is not None and not again:
        if current_load().is_contended(machine.is_cuda):
            return machine
        unsteady = max(machine.ceilings.spread.values(), default=0.0) > _UNSTEADY
        due = unsteady and _age_s(machine.cache_path) > _AGAIN_AFTER_S
        if not due and not _is_exceeded(machine, machine.ceilings):
            return machine
    known, measured = machine.ceilings, measure_ceilings(machine)
    # Without `again`, keeps cached ceilings that are higher than the new ones, because the machine may be busy now.
    machine = replace(machine, ceilings=measured if known is None or again else _higher(known, measured))
    with suppress(RedlineError):  # if the cache is not writable, the ceilings are measured again next time
        assert machine.ceilings is not None
        write_text(machine.cache_path, json.dumps(asdict(machine.ceilings), indent=1))
    return machine


def _age_s(path: Path) -> float:
    """Returns the seconds since the file was written; infinity if there is none."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return inf


def _higher(one: Ceilings, other: Ceilings) -> Ceilings:
    """Returns the higher value of each ceiling."""

    def rates(known: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
        return {name: max(known.get(name, 0.0), rate) for name, rate in measured.items()}

    return Ceilings(
        max(one.bytes_per_s, other.bytes_per_s),
        rates(one.matmul_flops_per_s, other.matmul_flops_per_s),
        rates(one.convolution_flops_per_s, other.convolution_flops_per_s),
        other.spread,
    )


def _is_exceeded(machine: Machine, cached: Ceilings) -> bool:
    """Returns whether fp32 matmul exceeds its cached ceiling, probably because that was measured on a busy machine."""
    with _tf32_allowed(False):
        rate = _matmul_rate(torch.device(machine.device), torch.float32)
    return rate > 1.1 * cached.matmul_flops_per_s["fp32"]


def measure_ceilings(machine: Machine) -> Ceilings:
    """Measures all ceilings in a few seconds; returns the best of several rounds, and how much the rounds differ."""
    start_s = time.monotonic()
    rounds = [_measure_round(machine, frozenset())]
    rates = rounds[0].matmul_flops_per_s
    # Emulated dtypes are measured only in the first round: measuring them again would take long and change nothing.
    emulated = frozenset(name for name in _FLOATS if name in rates and rates[name] < _SLOW_SHARE * rates["fp32"])
    while len(rounds) < _MOST_ROUNDS and time.monotonic() - start_s < _LONGEST_S:
        if len(rounds) >= _ROUNDS and max(_combine(rounds).spread.values()) <= _UNSTEADY:
            break
        rounds.append(_measure_round(machine, emulated))
    return _combine(rounds)


def _combine(rounds: Sequence[Ceilings]) -> Ceilings:
    """Returns the highest value of each ceiling; `spread` is the share by which the third best is below the best."""
    spread: dict[str, float] = {}

    def best(tables: list[Mapping[str, float]]) -> dict[str, float]:
        found = {}
        for name in tables[0]:
            rates = sorted((table[name] for table in tables if name in table), reverse=True)
            found[name] = rates[0]
            # Too few rounds do not show the noise, so the spread is 1; an emulated dtype needs only one round.
            unknown = len(rounds) < _ROUNDS and rates[0] > _SLOW_SHARE * tables[0]["fp32"]
            spread[name] = max(spread.get(name, 0.0), 1.0 if unknown else 1 - rates[:3][-1] / rates[0])
        return found

    return Ceilings(
        max(one.bytes_per_s for one in rounds),
        best([one.matmul_flops_per_s for one in rounds]),
        best([one.convolution_flops_per_s for one in rounds]),
        spread,
    )


def _measure_round(machine: Machine, skipped: frozenset[str]) -> Ceilings:
    """Measures all ceilings once, on random data, because zeros are faster."""
    device = torch.device(machine.device)
    size = (2**30 if machine.is_cuda else 2**27) // 4
    copied = _copy_rate(size, device)
    matmul, convolution = {}, {}
    for name, dtype in _FLOATS.items():
        if _is_hidden(name, machine) or name in skipped:
            continue
        with _tf32_allowed(False):
            matmul[name] = _matmul_rate(device, dtype)
            convolution[name] = _convolution_rate(device, dtype)
    if "tf32" in machine.hardware_dtypes:
        with _tf32_allowed(True):
            matmul["tf32"] = _matmul_rate(device, torch.float32)
            convolution["tf32"] = _convolution_rate(device, torch.float32)
    if not _is_hidden("int8", machine):
        matmul["int8"] = _matmul_rate(device, torch.int8)
        if not machine.is_cuda and machine.has("onnxruntime") and machine.has("onnx"):
            # torch's int8 matmul is not tuned for every CPU, so ONNX Runtime is measured too; the faster one counts.
            matmul["int8 (onnxruntime)"] = _onnxruntime_int8_rate()
    if "fp8" in machine.hardware_dtypes:
        matmul["fp8"] = _matmul_rate(device, torch.float8_e4m3fn)
    return Ceilings(copied, matmul, convolution)


def _is_hidden(dtype: str, machine: Machine) -> bool:
    """Returns whether a CPU limit hides this dtype.

    A hidden dtype is not measured, because the libraries would still use the hardware that the limit should hide.
    """
    return not machine.is_cuda and bool(cpu_limit()) and dtype not in machine.hardware_dtypes


@contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32; torch's default allows it for convolutions only.

    Also restores oneDNN, which torch disables for the whole process at the first bf16 matmul on a CPU without bf16.
    """
    backends: Any = torch.backends
    matmul, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    before = matmul.allow_tf32, cudnn.allow_tf32, mkldnn.enabled
    matmul.allow_tf32, cudnn.allow_tf32 = allowed, allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, mkldnn.enabled = before


def _best_seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.1) -> float:
    """Returns the time of the fastest run, because a ceiling is the best that the device can do."""

    def once() -> float:
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - start

    spent = best = once()  # the first call is slower than the next ones, because it also loads libraries
    repeats = 0
    while spent < budget_s or repeats < 3:
        if repeats and spent > 4 * budget_s:
            break
        seconds = once()
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_rate(size: int, device: torch.device) -> float:
    # Repeats one block of random numbers, because on a CPU drawing all numbers would take longer than the measurement.
    source = torch.randn(size // 64, device=device).repeat(64)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    # On a CPU, an emulated dtype may be a thousand times slower than fp32, so a small product is measured first. If it
    # is slow, the large one is skipped: it does not fit into the caches and would not raise the ceiling.
    sizes = (8192,) if device.type == "cuda" else (128, 1024)
    rate = 0.0
    for n in sizes:
        a, b = _operand(n, dtype, device), _operand(n, dtype, device)
        seconds = _best_seconds(lambda a=a, b=b: _product(a, b), device)
        rate = max(rate, 2 * n**3 / seconds)
        if n == 128 and 512 * seconds > 0.5:
            break
    return rate


def _operand(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (n, n), dtype=dtype, device=device)
    return torch.randn(n, n, device=device).to(dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.int8:
        return torch._int_mm(a, b.t())
    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return a @ b


def _onnxruntime_int8_rate(n: int = 1024) -> float:
    import numpy as np
    import onnx
    import onnxruntime

    rng = np.random.default_rng(0)
    weight = onnx.numpy_helper.from_array(rng.integers(-127, 128, (n, n), dtype=np.int8), "b")
    node = onnx.helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    a = onnx.helper.make_tensor_value_info("a", onnx.TensorProto.INT8, [n, n])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [n, n])
    graph = onnx.helper.make_graph([node], "int8", [a], [y], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"a": rng.integers(-127, 128, (n, n), dtype=np.int8)}
    return 2 * n**3 / _best_seconds(lambda: session.run(None, feed), torch.device("cpu"))


def _convolution_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the rate; on a CPU, the better rate of two shapes, because kernels are tuned for different shapes."""
    rate = 0.0
    for batch, channels, side in ((64, 512, 56),) if device.type == "cuda" else ((1, 64, 32), (4, 128, 28)):
        image = torch.randn(batch, channels, side, side, device=device).to(dtype)
        weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
        seconds = _best_seconds(lambda x=image, w=weight: F.conv2d(x, w, padding=1), device)
        rate = max(rate, 2 * batch * side * side * channels * channels * 9 / seconds)
        if 12.25 * seconds > 0.5:  # the dtype is emulated: the larger shape has 12.25 times the operations
            break
    return rate
