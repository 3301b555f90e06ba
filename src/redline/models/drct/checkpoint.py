"""Saves and loads DRCT weights. The config is inferred from their shapes; any mismatch raises.

Names and shapes on disk are those of the original implementation, so files are interchangeable. In these files, the
weights of the 1×1 convolutions have two more dimensions, and two derived buffers are saved with the weights.
"""

import re
from math import isqrt, prod
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from redline.errors import ModelError
from redline.files.atomic import write_bytes
from redline.files.weights import check_all_finite, mismatches, read_weights
from redline.machine.meta import allocate, meta_device
from redline.models.drct.config import BLOCKS_PER_GROUP, DrctConfig
from redline.models.drct.model import Drct

_COMPUTED = ("relative_position_index", "attn_mask")
_ADJUST = re.compile(r"layers\.\d+\.adjust\d\.weight")


def load_drct(path: str | Path) -> Drct:
    """Loads a model in evaluation mode."""
    return read_drct(read_weights(path), str(path))


def read_drct(weights: dict[str, Tensor], origin: str = "the weights") -> Drct:
    """Builds the model that fits the weights, and loads them."""
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(_COMPUTED)}
    config = find_config(found, origin)
    try:
        with meta_device():
            model = Drct(config)
    except RuntimeError as error:  # tensor sizes overflow
        raise ModelError(f"{origin!r} is damaged: the sizes of its {config} are too large.") from error
    expected = {name: official_shape(name, tensor) for name, tensor in model.state_dict().items()}
    if problems := mismatches(expected, {name: tuple(tensor.shape) for name, tensor in found.items()}):
        raise ModelError(f"{origin!r} looks like a {config} but does not fit it: {problems}.")
    check_all_finite(found, origin)
    model = allocate(model, "cpu")
    model.reset_mean()
    model.load_state_dict({name: tensor.float().view(model_shape(name, tensor)) for name, tensor in found.items()})
    return model.eval()


def save_drct(
    model: Drct, path: str | Path, dtype: torch.dtype = torch.float32, about: dict[str, str] | None = None
) -> None:
    """Writes safetensors atomically, with the names and shapes of the original implementation."""
    tensors = {
        name: tensor.detach().to("cpu", dtype).reshape(official_shape(name, tensor)).contiguous()
        for name, tensor in model.state_dict().items()
    }
    write_bytes(Path(path), to_safetensors(tensors, metadata=about))


def official_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape, 1, 1) if _ADJUST.fullmatch(name) else tuple(tensor.shape)


def model_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[:2]) if _ADJUST.fullmatch(name) else tuple(tensor.shape)


def find_config(weights: dict[str, Tensor], origin: str) -> DrctConfig:
    """Infers all hyper-parameters from the shapes of the weights."""
    if "layers.0.swin5.attn.qkv.weight" not in weights or "layers.0.adjust5.weight" not in weights:
        raise ModelError(f"{origin!r} is not a DRCT model: it seems to be {guess(weights)}.")
    if empty := next((name for name, tensor in weights.items() if not tensor.numel()), None):
        raise ModelError(f"{origin!r} is damaged: {empty!r} has the shape {tuple(weights[empty].shape)}.")
    try:
        blocks = [f"layers.0.swin{index + 1}" for index in range(BLOCKS_PER_GROUP)]
        tables = [weights[f"{block}.attn.relative_position_bias_table"].shape for block in blocks]
        features = weights["conv_before_upsample.0.weight"].shape[0]
        steps = [name for name in weights if re.fullmatch(r"upsample\.\d+\.weight", name)]
        return DrctConfig(
            scale=prod(isqrt(weights[name].shape[0] // features) for name in steps),
            groups=len({name.split(".")[1] for name in weights if name.startswith("layers.")}),
            width=weights["conv_first.weight"].shape[0],
            growth=weights["layers.0.adjust1.weight"].shape[0],
            features=features,
            window=(isqrt(tables[0][0]) + 1) // 2,
            heads=tuple(table[1] for table in tables),
            mlp_widths=tuple(weights[f"{block}.mlp.fc1.weight"].shape[0] for block in blocks),
        )
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ModelError(f"{origin!r} looks like a DRCT model but is incomplete: {error} is missing.") from error


# Other architectures and the weights that only they have, for error messages; the first match is named.
_SIGNS = (
    ("HAT", ("layers.0.residual_group.overlap_attn.qkv.weight",)),
    ("DAT", ("layers.0.blocks.0.attn.attn.0.relative_position_index",)),
    ("SwinIR or Swin2SR", ("layers.0.residual_group.blocks.0.attn.qkv.weight",)),
    ("a RealESRGAN (RRDBNet)", ("body.0.rdb1.conv1.weight",)),
    ("an old ESRGAN (RRDBNet)", ("model.1.sub.0.RDB1.conv1.0.weight",)),
    ("a RealESRGAN compact model (SRVGG)", ("body.0.weight", "body.1.weight")),
    ("an EDSR", ("head.0.weight", "body.0.body.0.weight")),
)


def guess(weights: dict[str, Tensor]) -> str:
    """Names the architecture to which weights that are not DRCT's seem to belong."""
    for name, signs in _SIGNS:
        if all(sign in weights for sign in signs):
            return name
    first = next(iter(weights))
    return f"something else ({len(weights)} tensors, the first is {first!r} of shape {tuple(weights[first].shape)})"
