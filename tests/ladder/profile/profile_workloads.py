"""Tiny workloads for the tests of `redline profile`, addressed by this file's path."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from redline import Workload


class Slow(nn.Module):
    """Sleeps, forward and backward, so that its time is known."""

    def __init__(self, forward_s: float, backward_s: float = 0.0) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.forward_s, self.backward_s)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad * 2, None, None


class Block(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.slow = Slow(forward_s, backward_s)
        self.linear = nn.Linear(16, 16)
        # In-place, because module backward hooks would break on it.
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(self.slow(x)))


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block(0.004, 0.012)
        self.second = Block(0.02, 0.012)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Attention(nn.Module):
    """Written out by hand, softmax as a layer of its own."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(heads, 1, 1))
        self.softmax = nn.Softmax(-1)
        self.out = nn.Linear(width, width, bias=False)

    def scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + self.bias) @ v

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.scores(q, k, v).transpose(1, 2).reshape(batch, length, width))


class FusedAttention(Attention):
    def scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Transformer(nn.Module):
    def __init__(self, attention: type[Attention], width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x)).softmax(-1)


class Perceptron(nn.Module):
    """No attention, although it has products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 128)
        self.head = nn.Linear(128, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.head(torch.relu(self.inner(x))), -1)


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), Slow(0.006))

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.body, x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


def _train(build, inputs) -> Workload:
    return Workload(
        build=build,
        inputs=inputs,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )


def sleepy() -> Workload:
    return Workload(build=Sleepy, inputs=lambda seed: torch.randn(4, 16))


def sleepy_training() -> Workload:
    return _train(Sleepy, lambda seed: torch.randn(4, 16))


def written_out(batch: int = 2) -> Workload:
    return Workload(build=lambda: Transformer(Attention), inputs=lambda seed: torch.randn(batch, 12, 32))


def written_out_training() -> Workload:
    return _train(lambda: Transformer(Attention), lambda seed: torch.randn(2, 12, 32))


def fused(batch: int = 2, length: int = 12, width: int = 32) -> Workload:
    return Workload(
        build=lambda: Transformer(FusedAttention, width),
        inputs=lambda seed: torch.randn(batch, length, width),
    )


def library_attention() -> Workload:
    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    return Workload(build=build, inputs=lambda seed: torch.randn(2, 12, 32))


def perceptron() -> Workload:
    return Workload(build=Perceptron, inputs=lambda seed: torch.randn(8, 64))


def perceptron_training() -> Workload:
    return _train(Perceptron, lambda seed: torch.randn(8, 64))


def recomputing() -> Workload:
    return _train(Recomputing, lambda seed: torch.randn(256, 64))


def not_recomputing() -> Workload:
    return _train(lambda: Recomputing().body, lambda seed: torch.randn(256, 64))


def convolutional(side: int = 16) -> Workload:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 4, 3, padding=1),
        )

    return Workload(build=build, inputs=lambda seed: torch.randn(2, 3, side, side))


def tied() -> Workload:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.head = nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    return _train(Tied, lambda seed: torch.randint(0, 50, (2, 8)))


def compiled() -> Workload:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        model.compile(backend="eager")
        return model

    return Workload(build=build, inputs=lambda seed: torch.randn(4, 8))


class Broken(nn.Module):
    """Fails in its third step, after the warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            raise ValueError("out of luck")
        return self.linear(x)


def broken() -> Workload:
    return Workload(build=Broken, inputs=lambda seed: torch.randn(2, 4))


def encoder_layer() -> Workload:
    return Workload(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda seed: torch.randn(2, 8, 16))
