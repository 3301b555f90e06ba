"""Small workloads, good and bad, addressed by path from the tests of the ladder."""

import os
import signal
import time

import torch
from torch import Tensor, nn

from redline import Gate, Workload


class Convolutions(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Perceptron(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.second = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def convolutions(batch: int = 2, size: int = 32) -> Workload:
    return Workload(Convolutions, lambda seed: torch.randn(batch, 3, size, size), items=batch, unit="image")


def perceptron(batch: int = 8) -> Workload:
    return Workload(Perceptron, lambda seed: torch.randn(batch, 16))


class Rounds(nn.Module):
    """Computes for a time that is proportional to `rounds`."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = torch.tanh(self.layer(x))
        return x


def rounds(rounds: int = 10) -> Workload:
    return Workload(lambda: Rounds(rounds), lambda seed: torch.randn(64, 256))


def training(batch: int = 8) -> Workload:
    return Workload(
        Perceptron,
        lambda seed: {"x": torch.randn(batch, 16)},
        loss=lambda output, _batch: (output**2).mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        items=batch,
        unit="row",
    )


class Deaf(nn.Module):
    """Ignores its input, as a benchmark model once did."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.answer + 0 * x.mean()


def deaf() -> Workload:
    return Workload(Deaf, lambda seed: torch.randn(2, 3))


def deaf_training() -> Workload:
    return Workload(
        Deaf,
        lambda seed: torch.randn(2, 3),
        loss=lambda output, _batch: (output**2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


class Nan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / 0 * 0


def nan() -> Workload:
    return Workload(Nan, lambda seed: torch.randn(2, 3))


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("this model is broken")


def raises() -> Workload:
    return Workload(Raises, lambda seed: torch.randn(2, 3))


class Random(nn.Module):
    """Fails its own gate: a different output each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + torch.randn(x.shape, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))


def random() -> Workload:
    return Workload(Random, lambda seed: torch.randn(2, 3))


def wrong_device() -> Workload:
    return Workload(Perceptron, lambda seed: torch.randn(8, 16, device="meta"))


def nothing() -> None:
    return None


def build_raises() -> Workload:
    def build() -> nn.Module:
        raise RuntimeError("no weights here")

    return Workload(build, lambda seed: torch.randn(2, 3))


def strict(batch: int = 8) -> Workload:
    """A gate that no approximation passes."""
    return Workload(Perceptron, lambda seed: torch.randn(batch, 16), gates=(Gate("max_error", 0.0),))


class Sleeper(nn.Module):
    """Takes a set time, so that a planted slow-down is known exactly."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)  # other load on the machine does not stretch a sleep as it does a busy loop
        return self.weight * x


def sleeper(milliseconds: float = 2.0) -> Workload:
    return Workload(lambda: Sleeper(milliseconds / 1e3), lambda seed: torch.randn(2, 3))


class Dies(nn.Module):
    """Kills its process, hangs, or runs out of memory after the first two builds have been fine."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "hang":
            time.sleep(600)
        if self.how == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        return self.weight * x


def dies(how: str = "crash") -> Workload:
    return Workload(lambda: Dies(how), lambda seed: torch.randn(2, 3))


def in_another_precision(dtype: str = "float16") -> Workload:
    kind = getattr(torch, dtype)
    return Workload(lambda: nn.Linear(16, 16).to(kind), lambda seed: torch.randn(4, 16).to(kind))


class Remembers(nn.Module):
    """Adds a mean over all that it was ever shown."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.5 * self.seen + 10 * x.detach().mean(0)
        return self.layer(x + self.seen)


def remembers() -> Workload:
    return Workload(Remembers, lambda seed: torch.randn(4, 8))


def remembers_in_training() -> Workload:
    return Workload(
        Remembers,
        lambda seed: torch.randn(4, 8),
        loss=lambda output, _: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
    )


def of_width(width: int = 4, batch: int = 3) -> Workload:
    return Workload(lambda: nn.Linear(width, 5), lambda seed: torch.randn(batch, width))
