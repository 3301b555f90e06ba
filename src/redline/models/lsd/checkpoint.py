"""LSD's files: safetensors whose header says which model it is; anything that does not fit exactly is refused."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from redline.errors import ModelError
from redline.files.atomic import write_bytes
from redline.files.weights import check_safetensors_header, check_tensors
from redline.models.lsd.config import LsdConfig
from redline.models.lsd.model import Lsd

ARCHITECTURE = "lsd"


def save_lsd(
    model: Lsd, path: str | Path, dtype: torch.dtype = torch.float32, about: dict[str, str] | None = None
) -> None:
    """Writes the weights, and what model they are of, whole or not at all; `about` goes into the header beside it."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    broken = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
    if broken:
        raise ModelError(f"{broken!r} holds values that are not finite in {str(dtype).removeprefix('torch.')}.")
    header = {**(about or {}), "architecture": ARCHITECTURE, "config": json.dumps(model.config.to_dict())}
    write_bytes(Path(path), to_safetensors(tensors, metadata=header))


def load_lsd(path: str | Path) -> Lsd:
    """The model of a file in fp32 on the CPU, ready for inference."""
    header, tensors = _read(Path(path))
    config = _config(header, str(path))
    if config.blocks * len(config.multipliers) > len(tensors):  # before as many blocks are built as the header says
        raise ModelError(f"{str(path)!r} says it is {config}, but has only {len(tensors)} weights.")
    try:
        with torch.device("meta"):
            model = Lsd(config)
    except (RuntimeError, TypeError) as error:  # sizes whose product no computer can address
        raise ModelError(f"{str(path)!r} is damaged: no {config} can be made.") from error
    problem = _mismatch({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, tensors)
    if problem:
        raise ModelError(f"{str(path)!r} says it is {config}, but {problem}.")
    broken = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
    if broken:
        raise ModelError(f"{str(path)!r} is damaged: {broken!r} holds values that are not finite.")
    model = model.to_empty(device="cpu")
    model.reset_sinusoids()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def read_about(path: str | Path) -> dict[str, str]:
    """What the header of an LSD's file says, the weights unread."""
    path = Path(path)
    try:
        check_safetensors_header(path)
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    header = read_about(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    check_tensors(tensors, str(path), path.stat().st_size)
    return header, tensors


def _unreadable(path: Path, error: Exception) -> ModelError:
    if not path.exists():
        return ModelError(f"there is no file {str(path)!r}.")
    if path.is_dir():
        return ModelError(f"{str(path)!r} is a folder, not a weight file.")
    return ModelError(f"{str(path)!r} is not a readable safetensors file: it is damaged, or something else.")


def _config(header: dict[str, str], origin: str) -> LsdConfig:
    if header.get("architecture") != ARCHITECTURE or "config" not in header:
        raise ModelError(f"{origin!r} is no LSD: its header does not say so.")
    try:
        values = json.loads(header["config"])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{origin!r} has a header that cannot be read.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{origin!r} has a header that cannot be read.")
    return LsdConfig.from_dict(values, origin)


def _mismatch(expected: dict[str, tuple[int, ...]], found: dict[str, Tensor]) -> str:
    missing = [name for name in expected if name not in found]
    foreign = [name for name in found if name not in expected]
    if missing:
        return f"{len(missing)} weights are missing ({missing[0]} …)"
    if foreign:
        return f"{len(foreign)} weights are not its own ({foreign[0]} …)"
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            return f"{name} is {tuple(found[name].shape)}, not {shape}"
    return ""
