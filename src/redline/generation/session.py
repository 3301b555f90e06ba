"""One batch's place on the device: a cache, a sampler, and the decode step, recorded once where there is a recorder.

The rehearsals and the recording run on a cache that is still empty, and `reset` undoes them. Of long prompts a piece is
recorded too, where the model can repeat it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from redline.cuda_graphs import GraphCapturer
from redline.generation.language_model import Cache, LanguageModel, ValuedCache
from redline.generation.planned import PlannedModel
from redline.generation.prompt_piece import PromptPiece
from redline.generation.readout import Readout
from redline.generation.sampling import Sampler, Sampling

# Pieces of a prompt that are worth a recording, which takes the time of four.
_MANY_PIECES = 8
# Tokens that may be under way to the host at a time: with two, a GPU has its next step before one is read.
_UNDER_WAY = {"cuda": 2}
_REHEARSALS = 3


class Session:
    """For `batch` rows of up to `room` tokens, and sampling of one form among the first `vocabulary` tokens."""

    @torch.no_grad()
    def __init__(
        self,
        model: PlannedModel,
        batch: int,
        room: int,
        sampling: Sampling,
        vocabulary: int,
        device: torch.device,
        recorder: GraphCapturer | None,
    ) -> None:
        self.model, self.device, self._recorder = model, device, recorder
        self._piece: PromptPiece | None = None
        self._pieces_are_refused = False
        self.cache: Cache = model.new_cache(batch, room)
        self.sampler = Sampler(sampling, batch, vocabulary, device)
        self.tokens_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ahead = _UNDER_WAY.get(device.type, 1)
        self.readout = Readout(batch, device, self.ahead)

        def run() -> None:
            # A row without a token takes any in, until the host has read of it.
            fed_B = self.tokens_B.clamp(min=0)
            self.tokens_B.copy_(self.sampler.next_tokens(model.step(fed_B, self.cache)))

        self._step: Callable[[], object] = run
        if recorder is not None:
            for _ in range(_REHEARSALS):
                recorder.warm_up(run)
            self._step = recorder.capture(run)[1]

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], sampling: Sampling, chunk: int, state: Any = None) -> None:
        """Takes the prompts in, after what the state remembers, and draws every row's first token."""
        self.cache.reset()
        if state is not None:
            cast(ValuedCache, self.cache).restore(state)
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
            # A row whose prompt ended before keeps what followed its end.
            logits_BV = new_BV if logits_BV is None else torch.where((counts_B > 0)[:, None], new_BV, logits_BV)
        assert logits_BV is not None
        self.tokens_B.copy_(self.sampler.next_tokens(logits_BV))
        self.readout.send(self.tokens_B)

    def _piece_for(self, prompts: Sequence[Sequence[int]], chunk: int) -> tuple[PromptPiece | None, int]:
        """The recorded piece, or one that is worth to be recorded now, and how many tokens come before the first."""
        tokens = self.model.piece(chunk) if self._recorder is not None else 0
        lead = self.model.until_piece(self.cache) if tokens else None
        if self._recorder is None or lead is None or self._pieces_are_refused:
            return None, 0
        if self._piece is None or self._piece.tokens != tokens:
            self._piece = None
            if (min(map(len, prompts)) - lead) // tokens < _MANY_PIECES:
                return None, 0
            where = (self.model, cast(ValuedCache, self.cache), len(prompts), tokens)
            try:
                self._piece = PromptPiece(*where, self._recorder, self.device)
            except RuntimeError as error:
                # For want of memory mostly; what was recorded so far is sound, and texts can be read without.
                self._pieces_are_refused = True
                why = (str(error).strip().splitlines() or ["no reason is given"])[0].rstrip(".")
                warnings.warn(f"long prompts are read slowly, since no piece can be recorded: {why}.", stacklevel=2)
                return None, 0
        return self._piece, lead

    def is_sound(self) -> bool:
        """Whether it may begin new texts: a cache that held a NaN spreads it, since 0 times NaN is NaN."""
        self.readout.clear()
        return not self.readout.missed

    @torch.no_grad()
    def advance(self) -> None:
        """Draws every row's next token; returns before the device has."""
        self.model.prepare(self.cache)
        self._step()
        self.readout.send(self.tokens_B)


def chunked(
    texts: Sequence[Sequence[int]], chunk: int, device: torch.device, lead: int = 0
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Some tokens of each text at a time, padded to the longest (B, S), how many each has of them (B), and whether all
    have a whole chunk of them. The first `lead` tokens come by themselves."""

    def sent(numbers: list[Any]) -> Tensor:
        tensor = torch.tensor(numbers)
        # From pinned memory nobody waits for what the device is still at.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    longest, shortest = max(map(len, texts)), min(map(len, texts))
    borders = sorted({0, *range(lead, longest, chunk), longest})
    for begin, end in pairwise(borders):
        parts = [list(text[begin:end]) for text in texts]
        padded = [part + [0] * (end - begin - len(part)) for part in parts]
        yield sent(padded), sent([len(part) for part in parts]), end - begin == chunk and end <= shortest


@torch.no_grad()
def read_on(model: LanguageModel, state: Any, texts: Sequence[Sequence[int]], chunk: int, device: torch.device) -> Any:
    """The state after these texts, which go on from the one given."""
    cache: ValuedCache = model.new_cache(len(texts), 0)
    cache.restore(state)
    for tokens_BS, counts_B, _ in chunked(texts, chunk, device):
        model.prefill(tokens_BS, counts_B, cache)
    return cache.snapshot()
