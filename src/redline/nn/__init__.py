"""Modules over `ops`, each with a plain implementation that is right and a fast one that agrees with it."""

from redline.nn.switchable import SwitchableModule
from redline.nn.window_attention import WindowAttention

__all__ = ["SwitchableModule", "WindowAttention"]
