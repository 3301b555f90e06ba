"""Copies tokens to the host without making the device wait.

An asynchronous copy to pinned memory follows each step and is read when it has completed; meanwhile the next step runs.
"""

from collections import deque

import torch
from torch import Tensor

from redline.generation.sampling import NO_TOKEN


class Readout:
    """A queue of tokens being copied. On a CPU the copies are synchronous."""

    def __init__(self, batch: int, device: torch.device, depth: int) -> None:
        self.cuda = device.type == "cuda"
        # One more buffer than copies in flight, so that none is overwritten before it is read.
        self.free = deque(torch.empty(batch, dtype=torch.int64, pin_memory=self.cuda) for _ in range(depth + 1))
        self.in_flight: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        # Whether a row ever got NO_TOKEN.
        self.missed = False

    def __len__(self) -> int:
        return len(self.in_flight)

    def send(self, tokens_B: Tensor) -> None:
        buffer = self.free.popleft()
        buffer.copy_(tokens_B, non_blocking=True)
        event = None
        if self.cuda:
            event = torch.cuda.Event()
            event.record()
        self.in_flight.append((buffer, event))

    def receive(self) -> list[int]:
        """Waits for the oldest tokens and returns them."""
        buffer, event = self.in_flight.popleft()
        if event is not None:
            event.synchronize()
        self.free.append(buffer)
        tokens: list[int] = buffer.tolist()
        self.missed = self.missed or NO_TOKEN in tokens
        return tokens

    def clear(self) -> None:
        """Waits for all copies in flight and drops them."""
        while self.in_flight:
            self.receive()
