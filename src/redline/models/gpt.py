"""GPT: pre-norm blocks with causal attention and a GELU MLP, learned positions, a tied head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.models.vit import Attention, Block


class CausalAttention(Attention):
    """Attends to earlier tokens only, with PyTorch's fused attention."""

    def forward(self, x_BNW: Tensor) -> Tensor:
        batch, length, width = x_BNW.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x_BNW).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Maps tokens (B, T) to logits (B, T, vocabulary) for the next token."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, CausalAttention(width, heads)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # The last layer of each residual branch starts small, so that the stream does not grow with the depth.
                branch = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if branch else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.length:
            raise ValueError(f"{length} tokens, but the model has {self.length} positions.")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)
