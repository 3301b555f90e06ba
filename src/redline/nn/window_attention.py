"""Swin window attention on tokens (B, H, W, C), with a learned relative position bias."""

import torch
from torch import Tensor, nn

from redline.nn.switchable import SwitchableModule
from redline.ops.window_attention import auto_implementation, window_attention


class WindowAttention(SwitchableModule):
    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv, table = self.qkv(tokens), self.relative_position_bias_table
        return self.proj(window_attention(qkv, table, self.window, self.shift, self.implementation))

    def active_implementation(self) -> str:
        if self.implementation != "auto":
            return self.implementation
        table = self.relative_position_bias_table
        some = table.new_zeros((1, self.window, self.window, 3 * self.proj.out_features))
        return auto_implementation(some, table, self.window)
