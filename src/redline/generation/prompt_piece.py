"""A piece of a long prompt, recorded once and replayed for each that follows.

To a model whose memory does not grow, pieces of one length differ by the numbers in its buffers alone. Launched one by
one, the kernels of a piece wait for the host most of the time; recorded, as a step is, they follow one another.
"""

from typing import Any

import torch
from torch import Tensor

from redline.cuda_graphs import GraphCapturer
from redline.generation.language_model import Repeating, ValuedCache


class PromptPiece:
    """For `tokens` of every row. What the rehearsals and the recording do to the cache is undone."""

    def __init__(
        self,
        model: Repeating,
        cache: ValuedCache,
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
            # The first makes what is made lazily, and shows the form of the logits: these are kept outside of the
            # recording's memory, which other recordings share.
            self._logits_BV = torch.empty_like(recorder.warm_up(self._take_in))
            recorder.warm_up(self._take_in)
            self._replay = recorder.capture(lambda: self._logits_BV.copy_(self._take_in()))[1]
        finally:
            cache.restore(before)

    def take_in(self, tokens_BS: Tensor) -> Tensor:
        """Logits (B, V) after the piece, which stand until the next one."""
        self._model.prepare_piece(self.tokens, self._cache)
        self._tokens_BS.copy_(tokens_BS)
        self._replay()
        return self._logits_BV

    def _take_in(self) -> Tensor:
        return self._model.take_in(self._tokens_BS, self._cache)
