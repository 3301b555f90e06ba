"""Common parts of int8, fp8 and int4: choosing linear layers, quantizing a layer, and measuring the stored bytes.

torchao is imported inside functions, because the import takes seconds and most plans do not need it.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.rewrites.io_adapter import unwrapped
from redline.machine.quiet import quiet
from redline.notation import format_bytes


def why_no_torchao() -> str:
    found = importlib.util.find_spec("torchao") is not None
    return "" if found else 'torchao is not installed: pip install "redline[int8]"'


def torchao_quantization() -> Any:
    """Imports `torchao.quantization` without its log lines."""
    with quiet():
        import torchao.quantization

        return torchao.quantization


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns every linear layer by its name in the user's model.

    Excludes the output projection of `nn.MultiheadAttention`, whose weight is used without calling the layer.
    """
    return {
        name: module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        and isinstance(module.weight, nn.Parameter)
    }


def has_quantizable_dtype(layer: nn.Linear) -> bool:
    return layer.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)


def choose_layers(
    rung: str, model: nn.Module, skip: Iterable[str], min_features: int, multiple: int = 1
) -> dict[str, nn.Linear]:
    """Returns the layers that are not in `skip` or inside a module in `skip`, and whose sizes are supported.

    Both sizes must be at least `min_features` and multiples of `multiple`.
    """
    names = {name for name, _ in unwrapped(model).named_modules()}
    unknown = [name for name in skip if name not in names]
    if unknown:
        raise RungError(f"{rung}: skip: the model has no module named {unknown[0]!r}.")
    return {
        name: layer
        for name, layer in linear_layers(model).items()
        if min(layer.in_features, layer.out_features) >= min_features
        and fits_multiple(layer, multiple)
        and has_quantizable_dtype(layer)
        and not any(name == left or name.startswith(f"{left}.") for left in skip)
    }


def fits_multiple(layer: nn.Linear, multiple: int) -> bool:
    return layer.in_features % multiple == 0 and layer.out_features % multiple == 0


def why_no_layers(chosen: Mapping[str, nn.Linear], model: nn.Module, otherwise: str) -> str:
    """Returns why no layer can be quantized, or an empty string."""
    if chosen:
        return ""
    found = linear_layers(model)
    if not found:
        return f"the model has no linear layer{otherwise}"
    if not any(map(has_quantizable_dtype, found.values())):
        dtype = str(next(iter(found.values())).weight.dtype).removeprefix("torch.")
        return f"its linear layers are in {dtype}, and only float32, bfloat16 and float16 can be quantized"
    return f"none of the {len(found)} linear layers can be quantized (too small, unsupported size, or skipped)"


def quantize_layer(rung: str, name: str, layer: nn.Linear, config: Any) -> None:
    check_finite(rung, name, layer)
    with quiet():
        torchao_quantization().quantize_(layer, config, filter_fn=lambda module, _: module is layer)
    if not is_quantized(layer.weight):
        raise RungError(f"{rung}: torchao did not quantize layer {name!r} of shape {tuple(layer.weight.shape)}.")


def check_finite(rung: str, name: str, layer: nn.Linear) -> None:
    """Raises if the weight of a layer is not finite, because quantization would hide a NaN."""
    if not bool(torch.isfinite(layer.weight).all()):
        raise RungError(f"{rung}: the weight of layer {name!r} contains NaN or infinity.")


def is_quantized(weight: Tensor) -> bool:
    """Returns whether a weight is a quantized tensor, of torchao or of the rung int4."""
    return is_traceable_wrapper_subclass(weight)


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a tensor occupies; `nbytes` of a quantized tensor is its unquantized size."""
    if not is_quantized(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyrefly: ignore[missing-attribute]
    return sum(stored_bytes(part) for name in names if isinstance(part := getattr(tensor, name), Tensor))


def weights_before(model: nn.Module) -> int:
    return sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))


def quantized_job(job: Job, dtype: str, mode: str, bytes_before: int, remarks: Iterable[str]) -> Job:
    """Returns the job after the model was quantized to `dtype` ("int8", "fp8", "int4"), with evidence for the proof."""
    job = job.with_evidence(dtype, (mode, bytes_before, tuple(remarks)))
    # Drops the parameters that the model no longer has, so that their memory is freed.
    alive = {id(p) for p in job.model.parameters()}
    parameters = {name: p for name, p in job.parameters.items() if id(p) in alive}
    return replace(job, precision=job.precision if mode == "weight_only" else dtype, parameters=parameters)


def quantization_proof(job: Job, dtype: str) -> str:
    mode, bytes_before, remarks = job.evidence[dtype]
    layers = [m for m in job.model.modules() if isinstance(m, nn.Linear)]
    changed = sum(is_quantized(m.weight) for m in layers)
    if not changed:
        return ""
    after = sum(stored_bytes(m.weight) for m in layers)
    parts = [
        f"{changed} of {len(layers)} linear layers hold {dtype} weights ({mode.replace('_', ' ')})",
        f"their weights shrank from {format_bytes(bytes_before)} to {format_bytes(after)}",
        *remarks,
    ]
    return "; ".join(parts)
