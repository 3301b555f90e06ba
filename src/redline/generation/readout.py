"""Tokens on their way to the host, without the device waiting for it.

A copy into pinned memory is put behind each step, and read when it has arrived; meanwhile the next step runs.
"""

from collections import deque

import torch
from torch import Tensor

from redline.generation.sampling import NO_TOKEN


class Readout:
    """First in, first out. On a CPU there is nothing to wait for."""

    def __init__(self, batch: int, device: torch.device, depth: int) -> None:
        self.cuda = device.type == "cuda"
        # One more than are ever under way, so that none is written over before it is read.
        self.free = deque(torch.empty(batch, dtype=torch.int64, pin_memory=self.cuda) for _ in range(depth + 1))
        self.under_way: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        # Whether a row ever had no token.
        self.missed = False

    def __len__(self) -> int:
        return len(self.under_way)

    def send(self, tokens_B: Tensor) -> None:
        buffer = self.free.popleft()
        buffer.copy_(tokens_B, non_blocking=True)
        event = None
        if self.cuda:
            event = torch.cuda.Event()
            event.record()
        self.under_way.append((buffer, event))

    def receive(self) -> list[int]:
        """The oldest that was sent; waits until it is there."""
        buffer, event = self.under_way.popleft()
        if event is not None:
            event.synchronize()
        self.free.append(buffer)
        tokens: list[int] = buffer.tolist()
        self.missed = self.missed or NO_TOKEN in tokens
        return tokens

    def clear(self) -> None:
        """Drops what nobody will read, once it can no longer arrive."""
        while self.under_way:
            self.receive()
