"""Weight files: read as tensors only, never as code.

A file may come from anywhere, so what it claims is checked against its size before anything is copied: a small file
could otherwise describe tensors of many gigabytes, or millions of empty ones.
"""

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from redline.errors import ModelError

# Where the training codes of the field put the weights; an average of them comes before the last step's.
_WRAPPERS = ("params_ema", "ema", "params", "state_dict", "model_state_dict", "model", "net", "generator", "weights")
# A safetensors header of these sizes is read in a second or two; the largest models of the field have a tenth of it.
_HEADER_BYTES, _HEADER_ENTRIES = 16 * 2**20, 32_768
_ZIP = b"PK\x03\x04"
# Tensors may share memory (tied weights), but not so much that they are several times the file.
_SHARED_BYTES_RATIO = 2
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}
_PREFIXES = ("module.", "_orig_mod.", "model.", "generator.", "net_g.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a `.pth` of any usual wrapping, on the CPU."""
    path = Path(path)
    if path.suffix.lower() == ".onnx" and path.exists():
        raise ModelError(f"{str(path)!r} is an exported network: give the weights that it was exported from.")
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
    except Exception as error:  # a damaged file can break its reader in any way
        reason = "it is damaged, or no weight file at all"
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors, or is damaged, and code in it is never run"
        raise ModelError(f"{str(path)!r} is not a readable weight file: {reason}.") from error
    tensors = unwrap(found, str(path))
    check_tensors(tensors, str(path), size_bytes)
    return tensors


def check_safetensors_header(path: Path) -> None:
    """Raises if the header is so large that parsing it would take minutes; an unreadable one is left to its parser."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.fstat(file.fileno()).st_size:
            return  # no safetensors file, or cut off
        if length > _HEADER_BYTES:
            raise ModelError(f"{str(path)!r} has a header of {length:,} bytes; at most {_HEADER_BYTES:,} are read.")
        # Every tensor is an object in the header, which is JSON.
        if file.read(length).count(b"{") > _HEADER_ENTRIES:
            raise ModelError(f"{str(path)!r} lists more than {_HEADER_ENTRIES:,} tensors, which no model has.")


def check_tensors(tensors: Mapping[str, Tensor], origin: str, size_bytes: int) -> None:
    """Raises unless all are dense tensors of usual types on the CPU that a file of `size_bytes` can hold."""
    total_bytes = 0
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            where = f"{kind} tensor" if tensor.device.type == "cpu" else f"tensor on the device {tensor.device.type!r}"
            raise ModelError(f"{origin!r}: {name!r} is a {where}; weights are dense tensors with their values.")
        if tensor.dtype not in _DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{origin!r}: {name!r} is of type {dtype}, which no weights are.")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            shape, held = tuple(tensor.shape), tensor.untyped_storage().nbytes()
            raise ModelError(f"{origin!r}: {name!r} has the shape {shape} but only {held:,} bytes of values.")
        total_bytes += tensor.nbytes
    if total_bytes > _SHARED_BYTES_RATIO * size_bytes:
        raise ModelError(f"{origin!r} has {size_bytes:,} bytes, but its tensors would take {total_bytes:,}.")


def mismatches(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    may_be: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """How weights differ from a model's by their names and shapes, or nothing; `may_be` may be there or not."""
    known = {**expected, **(may_be or {})}
    missing = [name for name in expected if name not in found]
    foreign = [name for name in found if name not in known]
    other = [name for name, shape in known.items() if name in found and found[name] != shape]
    said = []
    if missing:
        said.append(f"{len(missing)} weights are missing ({missing[0]} …)")
    if foreign:
        said.append(f"{len(foreign)} are not its own ({foreign[0]} …)")
    if other:
        name = other[0]
        said.append(f"{len(other)} have another shape ({name} is {found[name]}, not {known[name]})")
    return ", ".join(said)


@contextmanager
def _no_torch_warnings() -> Iterator[None]:
    """Hides what torch says of nested, sparse and quantized tensors, which `check_tensors` refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    # Mapped, a tensor that claims more than the file holds is an error and not a read beyond the end of memory.
    with _no_torch_warnings():
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip)


def unwrap(found: Any, origin: str) -> dict[str, Tensor]:
    """The tensors inside whatever a training code wrapped around them, names without its prefixes."""
    for _ in range(3):
        wrapper = next((key for key in _WRAPPERS if isinstance(found, dict) and isinstance(found.get(key), dict)), None)
        if wrapper is None:
            break
        found = found[wrapper]
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{origin!r} holds no weights.")
    with _no_torch_warnings():
        tensors = {n: value.detach() for n, value in found.items() if isinstance(n, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(f"{origin!r} holds no tensors.")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors
