"""Runs planned steps of a state model, in which each row has a state of fixed size, whatever the length of its text.

The states of the rows that decode are gathered into a separate cache, which is used as long as the same rows decode and
is then scattered back. On a GPU, the decode step is captured as a CUDA graph: the number of rows is rounded up to a
bucket, and each bucket has its own graph. Prompt chunks of one fixed length (pieces) are captured too.
"""

import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from redline.errors import first_line
from redline.generation.planned import PlannedModel
from redline.generation.prompt_piece import PromptPiece
from redline.generation.readback import Readback
from redline.generation.sampler import Sampler
from redline.generation.step_plan import PlannedRow, StepPlan
from redline.machine.cuda_graphs import GraphCapturer

Masks = Sequence[bytes | None]
_WARMUPS = 2
# Capturing a piece takes as long as computing four. A prompt with fewer pieces than this does not cause a capture.
_MIN_PIECES = 8


class StateRunner:
    """Runs steps with up to `rows` rows. `piece` is the number of tokens of a captured prompt chunk; 0: none."""

    def __init__(
        self,
        model: PlannedModel,
        rows: int,
        vocabulary: int,
        device: torch.device,
        recorder: GraphCapturer | None = None,
        piece: int = 0,
    ) -> None:
        self.model, self.device, self.recorder = model, device, recorder
        self.sampler = Sampler(rows, vocabulary, device)
        # The states of all rows. It grows when a higher row is used.
        self.pool: Any = model.new_cache(1, 0)
        self._capacity = 1
        self._empty: Any = model.new_cache(1, 0)
        self._last_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self._piece_tokens = piece if recorder is not None else 0
        self._piece: PromptPiece | None = None
        self._captured: dict[int, _CapturedStep] = {}
        self.capture_s = 0.0
        # Maps the rows that start in the next step to their initial states. Other new rows start with an empty state.
        self.starting: dict[int, Any] = {}
        # The rows that decode, and the cache that holds their states.
        self._active: list[int] = []
        self._active_cache: Any = None

    @torch.no_grad()
    def launch(self, plan: StepPlan, masks: Masks) -> Readback:
        """Starts a step. `masks` holds the allowed tokens of each sampled entry."""
        for sequence in plan.admitted:
            if sequence.row >= 0:
                request = sequence.request
                self.sampler.admit(sequence.row, request.sampling, request.prompt, sequence.output)
                self._set_state(sequence.row, self.starting.pop(sequence.row, None))
        singles = [row for row in plan.rows if row.count == 1]
        logits = []
        if singles:
            logits.append(self._decode(singles))
        longer = [row for row in plan.rows if row.count > 1]
        pieces = [row for row in longer if self._is_piece(row)]
        logits += [self._take_in(row) for row in pieces]
        others = [row for row in longer if row not in pieces]
        if others:
            logits.append(self._prefill(others))
        order = [*singles, *pieces, *others]
        sampling = [place for place, row in enumerate(order) if row.samples]
        if not sampling:
            return Readback(None, self.device)
        logits_NV = torch.cat(logits)
        logits_NV = logits_NV if len(sampling) == len(order) else logits_NV[sampling]
        entries = [order[place] for place in sampling]
        planned = [row for row in plan.rows if row.samples]
        by_row = {row.row: mask for row, mask in zip(planned, masks, strict=True)}
        sampled = self.sampler.sample(logits_NV, entries, [by_row[row.row] for row in entries])
        rows = torch.tensor([row.row for row in entries], device=self.device)
        self._last_R[rows] = sampled.tokens_N.clamp(min=0)
        return Readback(sampled.ordered_by([entries.index(row) for row in planned]), self.device)

    def _set_state(self, row: int, state: Any) -> None:
        if row in self._active:
            self._flush()
        if row >= self._capacity:
            held, before = self.pool, self._capacity
            self._capacity = 1 << row.bit_length()
            self.pool = self.model.new_cache(self._capacity, 0)
            self.pool.scatter(range(before), held)
        part = self._empty
        if state is not None:
            part = self.model.new_cache(1, 0)
            part.restore(state)
        self.pool.scatter([row], part)

    @torch.no_grad()
    def state_after(self, row: int, tokens: Sequence[int]) -> Any:
        """Returns a copy of the state of a row after further tokens. The row itself does not change."""
        self._flush()
        part = self.pool.gather([row])
        if tokens:
            self.model.prefill(self._tokens([tokens]), torch.tensor([len(tokens)], device=self.device), part)
        return part.snapshot()

    def _flush(self) -> None:
        """Copies the states of the rows that decode back to the pool, before the pool is used or other rows decode."""
        if self._active:
            self.pool.scatter(self._active, self._active_cache)
            self._active = []

    def _decode(self, rows: list[PlannedRow]) -> Tensor:
        wanted = [row.row for row in rows]
        bucket = 1 << (len(rows) - 1).bit_length()
        captured = self._captured_step(bucket) if self.recorder is not None else None
        if wanted != self._active:
            self._flush()
            # The padding consists of copies of the first row.
            padding = 0 if captured is None else bucket - len(wanted)
            gathered = self.pool.gather([*wanted, *wanted[:1] * padding])
            if captured is not None:
                captured.cache.scatter(range(bucket), gathered)
            self._active, self._active_cache = wanted, gathered if captured is None else captured.cache
        tokens_B = self._inputs(rows)
        self.model.prepare(self._active_cache)
        if captured is None:
            return self.model.step(tokens_B, self._active_cache)
        return captured.run(tokens_B)[: len(rows)]

    def _inputs(self, rows: list[PlannedRow]) -> Tensor:
        known = [row.input_tokens()[0] for row in rows]
        tokens_B = self._tokens(known)
        if -1 not in known:
            return tokens_B
        return torch.where(tokens_B < 0, self._last_R[self._tokens([row.row for row in rows])], tokens_B)

    def _captured_step(self, bucket: int) -> "_CapturedStep | None":
        if bucket not in self._captured:
            assert self.recorder is not None
            # Makes `_decode` gather the states of its rows into the new cache.
            self._flush()
            begun = perf_counter()
            try:
                cache = self.pool.gather([0] * bucket)
                self._captured[bucket] = _CapturedStep(self.model, cache, bucket, self.recorder, self.device)
                self.capture_s += perf_counter() - begun
            except RuntimeError as error:
                self._fail(error)
                return None
        return self._captured[bucket]

    def _prefill(self, rows: list[PlannedRow]) -> Tensor:
        ids = [row.row for row in rows]
        if set(ids) & set(self._active):
            self._flush()
        part = self.pool.gather(ids)
        longest = max(row.count for row in rows)
        tokens_BS = self._tokens([row.input_tokens() + [0] * (longest - row.count) for row in rows])
        counts_B = torch.tensor([row.count for row in rows], device=self.device)
        logits_BV = self.model.prefill(tokens_BS, counts_B, part)
        self.pool.scatter(ids, part)
        return logits_BV

    def _is_piece(self, row: PlannedRow) -> bool:
        """Returns whether the row's tokens are a captured piece. Captures one first if the prompt is long enough."""
        if row.count != self._piece_tokens or self.model.until_piece(self.pool.gather([row.row])) != 0:
            return False
        rest = row.sequence.total - row.start
        if self._piece is None and self.recorder is not None and rest >= _MIN_PIECES * self._piece_tokens:
            try:
                part = self.model.new_cache(1, 0)
                self._piece = PromptPiece(self.model, part, self._piece_tokens, self.recorder, self.device)
            except RuntimeError as error:
                self._fail(error)
        return self._piece is not None

    def _take_in(self, row: PlannedRow) -> Tensor:
        assert self._piece is not None
        if row.row in self._active:
            self._flush()
        self._piece.cache.scatter([0], self.pool.gather([row.row]))
        logits_BV = self._piece.take_in(self._tokens([row.input_tokens()]))
        self.pool.scatter([row.row], self._piece.cache)
        # Copies the logits, because the next piece overwrites the buffer.
        return logits_BV.clone()

    def _fail(self, error: RuntimeError) -> None:
        """Disables CUDA graphs with a warning after a failed capture, whose usual cause is a lack of memory."""
        self.recorder, self._piece_tokens = None, 0
        why = f"the capture of a CUDA graph failed: {first_line(error)}"
        warnings.warn(f"prompts and tokens are processed slowly, because {why}.", stacklevel=2)

    def _tokens(self, tokens: Any) -> Tensor:
        tensor = torch.tensor(tokens)
        # A copy from pinned memory does not make the host wait for running kernels.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class _CapturedStep:
    """A CUDA graph of the decode step of `rows` rows, whose states are in `cache`."""

    def __init__(
        self, model: PlannedModel, cache: Any, rows: int, recorder: GraphCapturer, device: torch.device
    ) -> None:
        self.cache = cache
        self._tokens_B = torch.zeros(rows, dtype=torch.int64, device=device)

        def step() -> Tensor:
            return model.step(self._tokens_B, cache)

        # The graph copies the logits out of the memory pool, because other graphs use the same pool.
        self._logits_BV = torch.empty_like(recorder.warm_up(step))
        for _ in range(_WARMUPS - 1):
            recorder.warm_up(step)
        self._replay: Callable[[], None] = recorder.capture(lambda: self._logits_BV.copy_(step()))[1]

    def run(self, tokens_B: Tensor) -> Tensor:
        """Runs the step, and returns the logits in a buffer that the next call overwrites."""
        self._tokens_B[: len(tokens_B)].copy_(tokens_B)
        self._replay()
        return self._logits_BV
