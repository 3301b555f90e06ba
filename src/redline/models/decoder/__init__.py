"""A Llama-style decoder, its key-value cache, and its weights in the Hugging Face layout."""

from redline.models.decoder.checkpoint import load_decoder, save_decoder
from redline.models.decoder.config import DecoderConfig
from redline.models.decoder.key_value_cache import KeyValueCache
from redline.models.decoder.model import Decoder

__all__ = ["Decoder", "DecoderConfig", "KeyValueCache", "load_decoder", "save_decoder"]
