"""Captures the prefill of one piece of a long prompt, and replays it for each following piece.

For a model whose state does not grow, pieces of one length differ only in the content of buffers. Launch
overhead limits kernels that are launched one by one; a replayed graph avoids it.
"""

from typing import Any

import torch
from torch import Tensor

from redline.cuda_graphs import GraphCapturer
from redline.generation.language_model import PiecewiseModel, StateCache


class PromptPiece:
    """The captured prefill of `tokens` tokens per row. Warm-up and capture leave the cache as it was."""

    def __init__(
        self,
        model: PiecewiseModel,
        cache: StateCache,
        batch: int,
        tokens: int,
        recorder: GraphCapturer,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self._model, self._cache = model, cache
        self._tokens_BS = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
        before: Any = cache.snapshot()
        try:
            # The first warm-up creates lazily allocated buffers and gives the shape of the logits. The graph copies
            # its logits out of its memory pool, which other graphs share.
            self._logits_BV = torch.empty_like(recorder.warm_up(self._take_in))
            recorder.warm_up(self._take_in)
            self._replay = recorder.capture(lambda: self._logits_BV.copy_(self._take_in()))[1]
        finally:
            cache.restore(before)

    def take_in(self, tokens_BS: Tensor) -> Tensor:
        """Returns logits (B, V) after the piece, which the next call overwrites."""
        self._model.prepare_piece(self.tokens, self._cache)
        self._tokens_BS.copy_(tokens_BS)
        self._replay()
        return self._logits_BV

    def _take_in(self) -> Tensor:
        return self._model.take_in(self._tokens_BS, self._cache)
