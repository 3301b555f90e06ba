"""The model architectures that can be trained on text, by `kind` under [model]."""

from redline.training.text.architecture import Architecture
from redline.training.text.decoder_settings import DecoderSettings
from redline.training.text.memory_settings import MemorySettings

ARCHITECTURES: dict[str, type[Architecture]] = {"decoder": DecoderSettings, "memory": MemorySettings}
