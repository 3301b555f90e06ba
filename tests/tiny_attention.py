"""Small attention modules, written in the ways that people write them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 12, 3


class Projected(nn.Module):
    """Projects to queries, keys and values in heads; subclasses say what happens between."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def join(self, x: Tensor) -> Tensor:
        return self.proj(x.transpose(1, 2).flatten(2))


class Plain(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        attention = (q @ k.transpose(-2, -1)) * self.scale
        return self.join(attention.softmax(dim=-1) @ v)


class Unbound(Projected):
    """As in vision transformers: unbind, dropout modules, a q that is scaled first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_drop = nn.Dropout(0.2)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * self.scale
        attention = self.attention_drop(self.softmax(q @ k.mT))
        x = (attention @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Divided(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        attention = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1))
        attention = F.dropout(F.softmax(attention, dim=-1), 0.3, training=self.training)
        return self.join(torch.matmul(attention, v))


class Folded(Projected):
    """Heads folded into the batch, with bmm."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (t.flatten(0, 1) for t in self.split(x))
        weights = torch.softmax(torch.bmm(q, k.permute(0, 2, 1)).mul(self.scale), dim=2)
        out = torch.bmm(weights, v).reshape(B, self.heads, N, C // self.heads)
        return self.join(out)


class Einsum(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        return self.join(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v))


class EinsumSequenceFirst(Projected):
    """Axes in another order, other letters in the second equation, keys first."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, C // self.heads).unbind(2)
        scores = torch.einsum("b m h d, b n h d -> b h n m", k, q) * self.scale
        out = torch.einsum("zxts,zsxe->ztxe", scores.softmax(-1), v)
        return self.proj(out.reshape(B, N, C))


class Biased(Projected):
    """A learned position bias, and a scale that is learned per head."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, length, length))
        self.logit_scale = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        attention = (q @ k.transpose(-2, -1)) * self.logit_scale
        attention += self.bias.unsqueeze(0)
        return self.join(attention.softmax(-1) @ v)


class Causal(Projected):
    """A buffer of ones below the diagonal, cut to length."""

    def __init__(self, longest: int = 16, fill: float = float("-inf")) -> None:
        super().__init__()
        self.fill = fill
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, self.fill)
        return self.join(F.softmax(att, dim=-1) @ v)


class Masked(Projected):
    """A mask that may be given: 1 where to look."""

    def __init__(self, fill: float = float("-inf")) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        attention = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attention = attention.masked_fill(mask[:, None, None, :] == 0, self.fill)
        return self.join(attention.softmax(-1) @ v)


class Added(Projected):
    """An additive mask and a condition together, the softmax in fp32."""

    def forward(self, x: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = torch.where(keep, bias + self.scale * (q @ k.transpose(-1, -2)), float("-inf"))
        return self.join(scores.float().softmax(dim=-1).to(v.dtype) @ v)


class Transposed(nn.Module):
    """As in autoencoders: values times the transpose of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = torch.bmm(q.permute(0, 2, 1), k) * 6**-0.5
        weights = F.softmax(weights, dim=2).permute(0, 2, 1)
        return x + torch.bmm(v, weights)


class OneKeyHead(Projected):
    """Many queries share one key and value."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k[:, :1].transpose(-2, -1) * self.scale
        return self.join(scores.softmax(-1) @ v[:, :1])


class Fused(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x
