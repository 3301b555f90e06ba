"""Copies the tokens that a step sampled from the device to the host. The device does not wait for the copies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.generation.sampler import Sampled


@dataclass(frozen=True)
class Result:
    """The tokens of all entries of a step. `logprobs` maps the entries that ask for it to the log-probability of their
    token, and to the most likely tokens with theirs."""

    tokens: list[int]
    logprobs: dict[int, tuple[float, list[tuple[int, float]]]]


class Readback:
    """Starts to copy the sampled tensors to its own pinned memory, which no later step overwrites."""

    def __init__(self, sampled: Sampled | None, device: torch.device) -> None:
        self._sampled = sampled
        self._event: torch.cuda.Event | None = None
        if sampled is None:
            return
        tensors = (sampled.tokens_N, sampled.chosen_M, sampled.top_MK, sampled.top_tokens_MK)
        self._copies = [None if tensor is None else _copied(tensor) for tensor in tensors]
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Result:
        """Waits until the copies are complete, and returns them as Python numbers."""
        if self._sampled is None:
            return Result([], {})
        if self._event is not None:
            self._event.synchronize()
        tokens, chosen, top, top_tokens = (None if copy is None else copy.tolist() for copy in self._copies)
        logprobs = {}
        if chosen is not None and top is not None and top_tokens is not None:
            for place, entry in enumerate(self._sampled.asked):
                pairs = list(zip(top_tokens[place], top[place], strict=True))
                logprobs[entry] = (chosen[place], pairs)
        assert tokens is not None
        return Result(tokens, logprobs)


def _copied(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
