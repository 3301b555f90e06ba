"""Captures the prefill of a piece of a prompt as a CUDA graph, which is replayed for each piece of a long prompt.

If the model's state does not grow, pieces of the same length differ only in the contents of buffers, so one CUDA graph
serves them all. Replaying it avoids the overhead of launching the kernels one by one.
"""

from typing import Any

import torch
from torch import Tensor

from redline.generation.language_model import PiecewiseModel
from redline.machine.cuda_graphs import GraphCapturer


class PromptPiece:
    """Appends pieces of `tokens` tokens to one text, whose state is in `cache`."""

    def __init__(
        self, model: PiecewiseModel, cache: Any, tokens: int, recorder: GraphCapturer, device: torch.device
    ) -> None:
        self.tokens, self.cache = tokens, cache
        self._model = model
        self._tokens_BS = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        # The first warm-up allocates lazily created buffers and returns logits of the final shape. The graph copies the
        # logits out of the memory pool, because other graphs use the same pool and may overwrite them.
        self._logits_BV = torch.empty_like(recorder.warm_up(self._take_in))
        recorder.warm_up(self._take_in)
        self._replay = recorder.capture(lambda: self._logits_BV.copy_(self._take_in()))[1]

    def take_in(self, tokens_BS: Tensor) -> Tensor:
        """Appends a piece, and returns the logits (1, V) after it in a buffer that the next call overwrites."""
        self._model.prepare_piece(self.tokens, self.cache)
        self._tokens_BS.copy_(tokens_BS)
        self._replay()
        return self._logits_BV

    def _take_in(self) -> Tensor:
        return self._model.take_in(self._tokens_BS, self.cache)
