"""Weight files: read as tensors only, never as code."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from redline.errors import ModelError

# Where the training codes of the field put the weights; an average of them comes before the last step's.
_WRAPPERS = ("params_ema", "ema", "params", "state_dict", "model_state_dict", "model", "net", "generator", "weights")
_PREFIXES = ("module.", "_orig_mod.", "model.", "generator.", "net_g.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a `.pth` of any usual wrapping, on the CPU."""
    path = Path(path)
    if path.suffix.lower() == ".onnx" and path.exists():
        raise ModelError(f"{str(path)!r} is an exported network: give the weights that it was exported from.")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise ModelError(f"cannot read the weights {str(path)!r}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged file can break its reader in any way
        reason = "it is damaged, or no weight file at all"
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors, or is damaged, and code in it is never run"
        raise ModelError(f"{str(path)!r} is not a readable weight file: {reason}.") from error
    return unwrap(found, str(path))


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


def _read_torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def unwrap(found: Any, origin: str) -> dict[str, Tensor]:
    """The tensors inside whatever a training code wrapped around them, names without its prefixes."""
    for _ in range(3):
        wrapper = next((key for key in _WRAPPERS if isinstance(found, dict) and isinstance(found.get(key), dict)), None)
        if wrapper is None:
            break
        found = found[wrapper]
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{origin!r} holds no weights.")
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ModelError(f"{origin!r} holds no tensors.")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors
