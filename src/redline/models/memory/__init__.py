"""Titans: a decoder with neural memory, whose state does not grow with the length of the text."""

from redline.models.memory.checkpoint import load_memory_model, save_memory_model
from redline.models.memory.config import TitanConfig
from redline.models.memory.model import TitanModel
from redline.models.memory.slot_bank import SlotBank
from redline.models.memory.state import MemoryState

__all__ = ["MemoryState", "SlotBank", "TitanConfig", "TitanModel", "load_memory_model", "save_memory_model"]
