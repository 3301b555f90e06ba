"""Reads weight files as tensors, without executing code in them.

Files are untrusted. The tensors that a file describes are checked against its size before anything is copied, because a
small file could otherwise describe tensors of many gigabytes, or millions of empty ones.
"""

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from redline.errors import ModelError
from redline.files.untrusted import reading

# Keys under which training frameworks store the weights; averaged weights (EMA) are preferred, so they come first.
_WRAPPERS = ("params_ema", "ema", "params", "state_dict", "model_state_dict", "model", "net", "generator", "weights")
# A safetensors header of this size takes a second or two to parse; the largest known models have a tenth of this.
_HEADER_BYTES, _HEADER_ENTRIES = 16 * 2**20, 32_768
_ZIP = b"PK\x03\x04"
# Tensors may share storage (tied weights), so their total size may be up to this many times the file's size.
_SHARED_BYTES_RATIO = 2
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}
_PREFIXES = ("module.", "_orig_mod.", "model.", "generator.", "net_g.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Returns the tensors of a `.safetensors` or `.pth` file on the CPU; unwraps the usual training checkpoints."""
    path = Path(path)
    if path.suffix.lower() == ".onnx" and path.exists():
        raise ModelError(f"{str(path)!r} is an exported ONNX model: use the weights that it was exported from.")
    try:
        if path.suffix.lower() == ".safetensors":
            check_safetensors_header(path)
            found = load_file(path)
        else:
            found = _read_torch(path)
        size_bytes = path.stat().st_size
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"cannot read the weights {str(path)!r}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged file can raise any exception in its parser
        reason = "it is damaged or not a weight file"
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is damaged or holds other objects than tensors, which are not loaded for security"
        raise ModelError(f"{str(path)!r} is not a readable weight file: {reason}.") from error
    tensors = unwrap(found, str(path))
    check_tensors(tensors, str(path), size_bytes)
    return tensors


@contextmanager
def open_safetensors(path: Path, what: str = "safetensors file") -> Iterator[Any]:
    """Opens a safetensors file; raises ModelError if it is missing, damaged or has a header that is too large."""
    with reading(path, what, ModelError, (SafetensorError,)):
        check_safetensors_header(path)
        with safe_open(path, "pt") as file:
            yield file


def check_safetensors_header(path: Path) -> None:
    """Raises if the header is so large that parsing it would take minutes; leaves other errors to the parser."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            return  # truncated or not a safetensors file
        if length > _HEADER_BYTES:
            raise ModelError(f"{str(path)!r} has a header of {length:,} bytes; at most {_HEADER_BYTES:,} are read.")
        # Every tensor is an object in the header, which is JSON.
        if file.read(length).count(b"{") > _HEADER_ENTRIES:
            raise ModelError(f"{str(path)!r} lists more than {_HEADER_ENTRIES:,} tensors, the most that is supported.")


def check_tensors(tensors: Mapping[str, Tensor], origin: str, size_bytes: int) -> None:
    """Raises unless all tensors are dense, on the CPU, of a supported dtype, and fit into a file of `size_bytes`."""
    total_bytes = 0
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            where = f"{kind} tensor" if tensor.device.type == "cpu" else f"tensor on the device {tensor.device.type!r}"
            raise ModelError(f"{origin!r}: {name!r} is a {where}; only dense CPU tensors are supported.")
        if tensor.dtype not in _DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{origin!r}: {name!r} has the unsupported dtype {dtype}.")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            shape, held = tuple(tensor.shape), tensor.untyped_storage().nbytes()
            raise ModelError(f"{origin!r}: {name!r} has the shape {shape} but only {held:,} bytes of values.")
        total_bytes += tensor.nbytes
    if total_bytes > _SHARED_BYTES_RATIO * size_bytes:
        raise ModelError(f"{origin!r} has {size_bytes:,} bytes, but its tensors would take {total_bytes:,}.")


def mismatches(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Returns how names and shapes differ from a model's weights, or ""; `optional` weights may be absent."""
    known = {**expected, **(optional or {})}
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in known]
    reshaped = [name for name, shape in known.items() if name in found and found[name] != shape]
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights are missing ({missing[0]} …)")
    if unexpected:
        problems.append(f"{len(unexpected)} weights are unexpected ({unexpected[0]} …)")
    if reshaped:
        name = reshaped[0]
        problems.append(f"{len(reshaped)} weights have another shape ({name} is {found[name]}, not {known[name]})")
    return ", ".join(problems)


def check_all_finite(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Raises for the first tensor with an infinite or NaN value."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{origin!r} is damaged: {name!r} has values that are not finite.")


@contextmanager
def _no_torch_warnings() -> Iterator[None]:
    """Hides torch's warnings about nested, sparse and quantized tensors, which `check_tensors` rejects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    # With mmap, a tensor larger than the file raises an error instead of being read beyond the end of the buffer.
    with _no_torch_warnings():
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip)


def unwrap(found: Any, origin: str) -> dict[str, Tensor]:
    """Returns the tensors of a training checkpoint, with wrapper prefixes removed from their names."""
    for _ in range(3):
        wrapper = next((key for key in _WRAPPERS if isinstance(found, dict) and isinstance(found.get(key), dict)), None)
        if wrapper is None:
            break
        found = found[wrapper]
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{origin!r} contains no weights.")
    with _no_torch_warnings():
        tensors = {n: value.detach() for n, value in found.items() if isinstance(n, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(f"{origin!r} contains no tensors.")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors
