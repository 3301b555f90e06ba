"""Modules built on `redline.ops`, each with a reference implementation and a fused one that agrees with it."""

from redline.nn.switchable import SwitchableModule
from redline.nn.window_attention import WindowAttention

__all__ = ["SwitchableModule", "WindowAttention"]
