"""The blocks of DRCT: densely connected groups of Swin blocks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.models.drct.config import DrctConfig
from redline.nn import WindowAttention

RESIDUAL_SHARE = 0.2


class Group(nn.Module):
    """Five densely connected blocks: each takes the group input and all earlier outputs, and adds `growth` channels."""

    def __init__(self, config: DrctConfig) -> None:
        super().__init__()
        widths = config.block_widths
        for index, width in enumerate(widths):
            shift = config.window // 2 if index % 2 else 0
            block = Block(width, config.heads[index], config.mlp_widths[index], config.window, shift)
            last = index == len(widths) - 1
            self.add_module(f"swin{index + 1}", block)
            self.add_module(f"adjust{index + 1}", nn.Linear(width, config.width if last else config.growth))

    def forward(self, tokens: Tensor) -> Tensor:
        seen = tokens
        for index in range(1, 5):
            new = self.get_submodule(f"adjust{index}")(self.get_submodule(f"swin{index}")(seen))
            seen = torch.cat((seen, F.leaky_relu(new, 0.2)), dim=-1)
        return tokens + RESIDUAL_SHARE * self.get_submodule("adjust5")(self.get_submodule("swin5")(seen))


class Block(nn.Module):
    """A Swin block: window attention and an MLP, each with pre-norm and a residual connection."""

    def __init__(self, width: int, heads: int, mlp_width: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, window, shift)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp_width)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(tokens)))
