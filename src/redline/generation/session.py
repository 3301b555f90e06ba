"""The device state of one batch: a cache, a sampler and the decode step, captured once if there is a recorder.

Warm-up and capture run on the empty cache, and `reset` undoes them. For long prompts, the prefill of one piece is
captured too, if the model supports it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from redline.cuda_graphs import GraphCapturer
from redline.generation.language_model import Cache, LanguageModel, StateCache
from redline.generation.planned import PlannedModel
from redline.generation.prompt_piece import PromptPiece
from redline.generation.readout import Readout
from redline.generation.sampling import Sampler, Sampling

# A capture takes as long as four pieces, so it pays off for prompts of at least this many pieces.
_MIN_PIECES = 8
# Steps in flight: with two, a GPU has its next step before the tokens of the last one are read.
_IN_FLIGHT = {"cuda": 2}
_WARMUPS = 3


class Session:
    """Serves `batch` rows of up to `capacity` tokens, and sampling of one form."""

    @torch.no_grad()
    def __init__(
        self,
        model: PlannedModel,
        batch: int,
        capacity: int,
        sampling: Sampling,
        vocabulary: int,
        device: torch.device,
        recorder: GraphCapturer | None,
    ) -> None:
        self.model, self.device, self._recorder = model, device, recorder
        self._piece: PromptPiece | None = None
        self._capture_failed = False
        self.cache: Cache = model.new_cache(batch, capacity)
        self.sampler = Sampler(sampling, batch, vocabulary, device)
        self.tokens_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ahead = _IN_FLIGHT.get(device.type, 1)
        self.readout = Readout(batch, device, self.ahead)

        def run() -> None:
            # A row with NO_TOKEN gets token 0 as input until the host reads the NO_TOKEN.
            fed_B = self.tokens_B.clamp(min=0)
            self.tokens_B.copy_(self.sampler.next_tokens(model.step(fed_B, self.cache)))

        self._step: Callable[[], object] = run
        if recorder is not None:
            for _ in range(_WARMUPS):
                recorder.warm_up(run)
            self._step = recorder.capture(run)[1]

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], sampling: Sampling, chunk: int, state: Any = None) -> None:
        """Prefills the prompts, which continue `state` if it is given, and samples the first token of every row."""
        self.cache.reset()
        if state is not None:
            cast(StateCache, self.cache).restore(state)
        self.sampler.start(sampling)
        self.readout.clear()
        piece, lead = self._piece_for(prompts, chunk)
        logits_BV: Tensor | None = None
        for tokens_BS, counts_B, is_piece in chunked(prompts, piece.tokens if piece else chunk, self.device, lead):
            self.sampler.notice(tokens_BS, counts_B)
            if piece and is_piece:
                new_BV = piece.take_in(tokens_BS)
            else:
                new_BV = self.model.prefill(tokens_BS, counts_B, self.cache)
            # A row whose prompt has ended keeps its logits.
            logits_BV = new_BV if logits_BV is None else torch.where((counts_B > 0)[:, None], new_BV, logits_BV)
        assert logits_BV is not None
        self.tokens_B.copy_(self.sampler.next_tokens(logits_BV))
        self.readout.send(self.tokens_B)

    def _piece_for(self, prompts: Sequence[Sequence[int]], chunk: int) -> tuple[PromptPiece | None, int]:
        """Returns the captured piece, or None, and the number of tokens before the first piece.

        Captures the piece if that has not been done and pays off.
        """
        tokens = self.model.piece(chunk) if self._recorder is not None else 0
        lead = self.model.until_piece(self.cache) if tokens else None
        if self._recorder is None or lead is None or self._capture_failed:
            return None, 0
        if self._piece is None or self._piece.tokens != tokens:
            self._piece = None
            if (min(map(len, prompts)) - lead) // tokens < _MIN_PIECES:
                return None, 0
            where = (self.model, cast(StateCache, self.cache), len(prompts), tokens)
            try:
                self._piece = PromptPiece(*where, self._recorder, self.device)
            except RuntimeError as error:
                # Usually out of memory. Prompts can be prefilled without the capture.
                self._capture_failed = True
                why = (str(error).strip().splitlines() or ["no reason is given"])[0].rstrip(".")
                warnings.warn(
                    f"long prompts are prefilled slowly, because the capture of a CUDA graph failed: {why}.",
                    stacklevel=2,
                )
                return None, 0
        return self._piece, lead

    def is_sound(self) -> bool:
        """Whether new texts can start here. A cache that held a NaN must not be reused, because 0 times NaN is NaN."""
        self.readout.clear()
        return not self.readout.missed

    @torch.no_grad()
    def advance(self) -> None:
        """Samples the next token of every row, without waiting for the device."""
        self.model.prepare(self.cache)
        self._step()
        self.readout.send(self.tokens_B)


def chunked(
    texts: Sequence[Sequence[int]], chunk: int, device: torch.device, lead: int = 0
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yields the texts in chunks of `chunk` tokens, after a first chunk of `lead` tokens.

    An item has the tokens of a chunk, padded to the longest row (B, S), the number of tokens in each row (B), and
    whether every row has a full chunk.
    """

    def sent(numbers: list[Any]) -> Tensor:
        tensor = torch.tensor(numbers)
        # From pinned memory, the copy does not wait for the running kernels.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    longest, shortest = max(map(len, texts)), min(map(len, texts))
    borders = sorted({0, *range(lead, longest, chunk), longest})
    for begin, end in pairwise(borders):
        parts = [list(text[begin:end]) for text in texts]
        padded = [part + [0] * (end - begin - len(part)) for part in parts]
        yield sent(padded), sent([len(part) for part in parts]), end - begin == chunk and end <= shortest


@torch.no_grad()
def read_on(model: LanguageModel, state: Any, texts: Sequence[Sequence[int]], chunk: int, device: torch.device) -> Any:
    """Returns the state after these texts; text i continues row i of `state`."""
    cache: StateCache = model.new_cache(len(texts), 0)
    cache.restore(state)
    for tokens_BS, counts_B, _ in chunked(texts, chunk, device):
        model.prefill(tokens_BS, counts_B, cache)
    return cache.snapshot()
