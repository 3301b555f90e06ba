"""The address `hf:FOLDER`: a model of transformers from a local folder with `config.json`; nothing is downloaded.

Weights in the folder are loaded; without them the model gets random weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import WorkloadError
from redline.ladder.workload import Inputs, Workload
from redline.ladder.workload_prefixes import WorkloadPrefix, register_prefix
from redline.ladder.workloads.images import random_images
from redline.ladder.workloads.optional import import_for
from redline.ladder.workloads.random_weights import replace_near_zero_weights


def _tokens(config: Any, batch: int, length: int) -> Tensor:
    # Skips the lowest ids, which are usually special tokens such as padding.
    first = min(100, config.vocab_size // 2)
    return torch.randint(first, config.vocab_size, (batch, length))


def _images(config: Any, batch: int, _: int) -> Tensor:
    size = getattr(config, "image_size", 224)
    return random_images(batch, size if isinstance(size, int) else tuple(size)[:2], getattr(config, "num_channels", 3))


def _spectrogram(config: Any, batch: int, length: int) -> Tensor:
    positions = getattr(config, "max_source_positions", length)
    return torch.randn(batch, config.num_mel_bins, 2 * positions)


def _waveform(config: Any, batch: int, _: int) -> Tensor:
    if hasattr(config, "num_mel_bins"):
        return torch.randn(batch, config.max_length, config.num_mel_bins)
    return torch.randn(batch, 16_000)  # one second of audio


# The function that makes an input, by the name of the model's argument.
_INPUTS: dict[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _images,
    "input_features": _spectrogram,
    "input_values": _waveform,
}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def _find_function(folder: str) -> Callable[..., Workload]:
    transformers: Any = import_for(f"hf:{folder}", "transformers")
    if not Path(folder, "config.json").is_file():
        raise WorkloadError(f"hf:{folder}: there is no file {str(Path(folder, 'config.json'))!r}.")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False  # a key-value cache would be part of the output
    cls = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    if cls is transformers.AutoModel:
        cls = transformers.MODEL_MAPPING[type(config)]
    names = [cls.main_input_name]
    names += ["decoder_input_ids"] if config.is_encoder_decoder else []
    names += ["pixel_values"] if hasattr(config, "text_config") and hasattr(config, "projection_dim") else []
    if unknown := [name for name in names if name not in _INPUTS]:
        raise WorkloadError(
            f"hf:{folder}: {cls.__name__} takes {unknown[0]!r}, and only {', '.join(_INPUTS)} can be made from a "
            "config: write a file.py:function."
        )

    def model(batch: int = 1, length: int = 128, padding: float = 0.0) -> Workload:
        """Returns the workload; in every second row the last `padding` (a fraction) of the tokens are masked."""

        def build() -> nn.Module:
            if any(True for pattern in _WEIGHTS for _ in Path(folder).glob(pattern)):
                return cls.from_pretrained(folder, config=config, local_files_only=True)
            return replace_near_zero_weights(cls._from_config(config))

        def inputs(seed: int) -> Inputs:
            parts = {"pixel_values": "vision_config", "input_ids": "text_config"}
            own = {name: getattr(config, parts.get(name, ""), config) for name in names}
            made = {name: _INPUTS[name](own[name], batch, length) for name in names}
            if padding and "input_ids" in made:
                made["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
                made["attention_mask"][::2, length - int(padding * length) :] = 0
            dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
            return {name: x.to(dtype) if x.is_floating_point() else x for name, x in made.items()}

        is_text = "input_ids" in names
        items, unit = (batch * length, "token") if is_text else (batch, "sample")
        return Workload(build, inputs, items=items, unit=unit, name=f"hf:{Path(folder).name}")

    return model


register_prefix(WorkloadPrefix("hf", _find_function, ("hf:FOLDER",)))
