"""The device state of one batch: a cache, a sampler and the decode step, captured once if there is a recorder.

Warm-up and capture write to the empty cache, which is reset before the first text. If the model supports it, the
prefill of one piece of a prompt is captured too, and replayed for each piece of a long prompt.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from redline.errors import first_line
from redline.generation.language_model import PiecewiseModel, StateCache, StateModel
from redline.generation.planned import PlannedModel
from redline.generation.request import SamplingOptions
from redline.generation.sampling import NO_TOKEN
from redline.generation.static_batch.sampling import Sampler
from redline.machine.cuda_graphs import GraphCapturer

# Capturing takes as long as four pieces; prompts of fewer pieces than this are prefilled without a capture.
_MIN_PIECES = 8
# The largest number of launched steps whose tokens have not been read. With two, a GPU does not wait for the host.
_IN_FLIGHT = {"cuda": 2}
_WARMUPS = 3


class Readout:
    """A queue of tokens that are being copied to the host. The device does not wait for these copies.

    An asynchronous copy to pinned memory follows each step and is read when it has completed; meanwhile the next step
    runs. On a CPU the copies are synchronous.
    """

    def __init__(self, batch: int, device: torch.device, depth: int) -> None:
        self.cuda = device.type == "cuda"
        # There is one more buffer than copies in flight, so that no buffer is overwritten before it is read.
        self.free = deque(torch.empty(batch, dtype=torch.int64, pin_memory=self.cuda) for _ in range(depth + 1))
        self.in_flight: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        # Whether any row ever got NO_TOKEN.
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


class PromptPiece:
    """The captured prefill of `tokens` tokens per row, replayed for each piece of a long prompt.

    If the model's state does not grow, pieces of the same length differ only in the contents of buffers, so one CUDA
    graph serves them all. Replaying it avoids the overhead of launching the kernels one by one. Warm-up and capture
    leave the cache as it was.
    """

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
            # the logits out of the memory pool, because other graphs use the same pool and may overwrite them.
            self._logits_BV = torch.empty_like(recorder.warm_up(self._take_in))
            recorder.warm_up(self._take_in)
            self._replay = recorder.capture(lambda: self._logits_BV.copy_(self._take_in()))[1]
        finally:
            cache.restore(before)

    def take_in(self, tokens_BS: Tensor) -> Tensor:
        """Returns the logits (B, V) after the piece, in a buffer that the next call overwrites."""
        self._model.prepare_piece(self.tokens, self._cache)
        self._tokens_BS.copy_(tokens_BS)
        self._replay()
        return self._logits_BV

    def _take_in(self) -> Tensor:
        return self._model.take_in(self._tokens_BS, self._cache)


class Session:
    """Generates `batch` rows of up to `capacity` tokens; all its texts use the same kinds of sampling settings."""

    @torch.no_grad()
    def __init__(
        self,
        model: PlannedModel,
        batch: int,
        capacity: int,
        sampling: SamplingOptions,
        vocabulary: int,
        device: torch.device,
        recorder: GraphCapturer | None,
    ) -> None:
        self.model, self.device, self._recorder = model, device, recorder
        self._piece: PromptPiece | None = None
        self._capture_failed = False
        self.cache: Any = model.new_cache(batch, capacity)
        self.sampler = Sampler(sampling, batch, vocabulary, device)
        self.tokens_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ahead = _IN_FLIGHT.get(device.type, 1)
        self.readout = Readout(batch, device, self.ahead)

        def run() -> None:
            # After NO_TOKEN, a row gets token 0 as its next input, because the host reads the NO_TOKEN only later.
            fed_B = self.tokens_B.clamp(min=0)
            self.tokens_B.copy_(self.sampler.next_tokens(model.step(fed_B, self.cache)))

        self._step: Callable[[], object] = run
        if recorder is not None:
            for _ in range(_WARMUPS):
                recorder.warm_up(run)
            self._step = recorder.capture(run)[1]

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, chunk: int, state: Any = None) -> None:
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
            # A row whose prompt ended in an earlier chunk keeps the logits of that chunk.
            logits_BV = new_BV if logits_BV is None else torch.where((counts_B > 0)[:, None], new_BV, logits_BV)
        assert logits_BV is not None
        self.tokens_B.copy_(self.sampler.next_tokens(logits_BV))
        self.readout.send(self.tokens_B)

    def _piece_for(self, prompts: Sequence[Sequence[int]], chunk: int) -> tuple[PromptPiece | None, int]:
        """Returns the captured piece, or None if none is used, and the number of tokens before the first piece.

        If no piece has been captured yet, captures one, provided that these prompts are long enough.
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
                # The usual cause is a lack of memory. Prompts can be prefilled without the capture.
                self._capture_failed = True
                why = f"the capture of a CUDA graph failed: {first_line(error)}"
                warnings.warn(f"long prompts are prefilled slowly, because {why}.", stacklevel=2)
                return None, 0
        return self._piece, lead

    def is_sound(self) -> bool:
        """Returns False after a NO_TOKEN: the cache must not be reused, because a NaN would spread (0 · NaN = NaN)."""
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

    Each item is a tuple: the chunk's tokens (B, S), padded to the longest row; the number of tokens in each row (B,);
    and whether every row has `chunk` tokens.
    """

    def sent(numbers: list[Any]) -> Tensor:
        tensor = torch.tensor(numbers)
        # A copy from pinned memory does not make the host wait for running kernels.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    longest, shortest = max(map(len, texts)), min(map(len, texts))
    borders = sorted({0, *range(lead, longest, chunk), longest})
    for begin, end in pairwise(borders):
        parts = [list(text[begin:end]) for text in texts]
        padded = [part + [0] * (end - begin - len(part)) for part in parts]
        yield sent(padded), sent([len(part) for part in parts]), end - begin == chunk and end <= shortest


@torch.no_grad()
def read_on(model: StateModel, state: Any, texts: Sequence[Sequence[int]], chunk: int, device: torch.device) -> Any:
    """Returns the state after these texts; text i continues row i of `state`."""
    cache: StateCache = model.new_cache(len(texts), 0)
    cache.restore(state)
    for tokens_BS, counts_B, _ in chunked(texts, chunk, device):
        model.prefill(tokens_BS, counts_B, cache)
    return cache.snapshot()
