"""Runs planned steps of a paged model: one call for the new tokens of all rows, then one for sampling.

A token that was sampled stays on the device as the next input, so a step can be launched before the last one is read.
Steps in which every row decodes are captured as CUDA graphs, one for each number of rows and pages that is rounded up
to a bucket. Nothing but the sizes of buckets reaches a captured launch as a number.

T: tokens of a step, R: its rows, N: sampled tokens, W: pages in the table of a row.
"""

import warnings
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from redline.errors import first_line
from redline.generation.planned import PlannedModel
from redline.generation.readback import Readback
from redline.generation.sampler import Sampler
from redline.generation.step_plan import PlannedRow, StepPlan
from redline.machine.cuda_graphs import GraphCapturer
from redline.models.decoder.paged_cache import FlatCall, PagePool
from redline.ops.paged_attention import PagedRows

Masks = Sequence[bytes | None]
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
# Tables of captured steps have a power of four times this number of pages.
_LEAST_WIDTH = 16
_WARMUPS = 2
# A row that decodes is split into at most this many parts, and parts have at least this many positions.
_MOST_SPLITS, _LEAST_SPLIT = 64, 256


class DecoderRunner:
    """`pages` of `size` tokens, and `rows` rows of up to `context` tokens each."""

    def __init__(
        self,
        model: PlannedModel,
        pool: PagePool,
        rows: int,
        context: int,
        vocabulary: int,
        device: torch.device,
        recorder: GraphCapturer | None = None,
    ) -> None:
        self.model, self.pool, self.device, self.recorder = model, pool, device, recorder
        self.size = pool.page_size
        self.sampler = Sampler(rows, vocabulary, device)
        self._tables = np.zeros((rows, -(-context // self.size)), dtype=np.int32)
        # The number of pages of each row that `_tables` holds.
        self._held = [0] * rows
        self._last_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._split = max(_LEAST_SPLIT, -(-context // _MOST_SPLITS))
        self._captured: dict[tuple[int, int], CapturedStep] = {}
        self.capture_s = 0.0

    @torch.no_grad()
    def launch(self, plan: StepPlan, masks: Masks) -> Readback:
        """Starts a step without waiting for the device. `masks` holds the allowed tokens of each sampled entry."""
        for sequence in plan.admitted:
            if sequence.row >= 0:
                request = sequence.request
                self.sampler.admit(sequence.row, request.sampling, request.prompt, sequence.output)
                self._held[sequence.row] = 0
        for row in plan.rows:
            blocks, held = row.sequence.blocks, self._held[row.row]
            if len(blocks) > held:
                self._tables[row.row, held : len(blocks)] = blocks[held:]
                self._held[row.row] = len(blocks)
        logits_NV = self._logits(plan)
        entries = [row for row in plan.rows for _ in range(row.samples)]
        if not entries:
            return Readback(None, self.device)
        sampled = self.sampler.sample(logits_NV, entries, masks)
        rows_N = self._sent(np.array([entry.row for entry in entries], dtype=np.int32)).long()
        # After NO_TOKEN, a row gets token 0 as its next input, because the host reads the NO_TOKEN only later.
        self._last_R[rows_N] = sampled.tokens_N.clamp(min=0).int()
        return Readback(sampled, self.device)

    def warm_up(self, rows: int) -> None:
        """Captures the steps of up to this many rows and short texts, so that no request waits for it."""
        if self.recorder is not None:
            for bucket in reversed([one for one in _ROW_BUCKETS if one < 2 * rows]):
                self._capture(bucket, min(_LEAST_WIDTH, self._tables.shape[1]))

    def _logits(self, plan: StepPlan) -> Tensor:
        rows = plan.rows
        counts = np.array([row.count for row in rows], dtype=np.int32)
        lengths = np.array([row.start for row in rows], dtype=np.int32)
        width = int((lengths + counts - 1).max()) // self.size + 1
        captured = self._captured_step(len(rows), width) if plan.is_decode else None
        if captured is not None:
            return captured.run(self._inputs(rows, counts, lengths, captured.rows, captured.width))[: len(rows)]
        inputs = self._sent(self._inputs(rows, counts, lengths, len(rows), width))
        tokens, samples = int(counts.sum()), sum(row.samples for row in rows)
        singles = int((counts == 1).sum())
        return self._run(inputs, tokens, len(rows), width, samples, singles, plan.is_decode)

    def _run(
        self, inputs: Tensor, tokens: int, rows: int, width: int, samples: int, singles: int, is_decode: bool
    ) -> Tensor:
        """Calls the model with the inputs that `_inputs` packed."""
        sizes = (tokens, tokens, tokens, tokens, rows + 1, rows, rows * width, samples)
        tokens_T, positions_T, slots_T, rows_T, starts_E, lengths_R, tables, sampled_N = inputs.split(sizes)
        tokens_T = torch.where(tokens_T < 0, self._last_R[rows_T], tokens_T)
        numbers = (slots_T, starts_E, lengths_R, tables.view(rows, width))
        call = FlatCall(positions_T, sampled_N, PagedRows(*numbers, singles=singles, split=self._split), self.pool)
        return self.model.flat(tokens_T, call, is_decode)

    def _inputs(
        self, rows: list[PlannedRow], counts: np.ndarray, lengths: np.ndarray, padded_rows: int, width: int
    ) -> np.ndarray:
        """Returns all numbers of a step in one array, so that there is one copy to the device.

        Rows of padding have one token, which is not stored.
        """
        ids = np.array([row.row for row in rows], dtype=np.int32)
        padding = padded_rows - len(rows)
        starts = np.zeros(padded_rows + 1, dtype=np.int32)
        starts[1:] = np.concatenate((counts, np.ones(padding, dtype=np.int32))).cumsum()
        tables = np.zeros((padded_rows, width), dtype=np.int32)
        tables[: len(rows)] = self._tables[ids, :width]
        of_token = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(of_token), dtype=np.int32) - starts[of_token] + lengths[of_token]
        slots = tables[of_token, positions // self.size] * self.size + positions % self.size
        tokens = [token for row in rows for token in row.input_tokens()]
        sampled = [end - left for row, end in zip(rows, starts[1:], strict=False) for left in range(row.samples, 0, -1)]
        zeros = np.zeros(padding, dtype=np.int32)
        parts = (
            *(tokens, zeros, positions, zeros, slots, zeros - 1, ids[of_token], zeros),
            *(starts, lengths, zeros, tables.ravel(), sampled, np.arange(len(rows), padded_rows)),
        )
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])

    def _captured_step(self, rows: int, width: int) -> "CapturedStep | None":
        if self.recorder is None or rows > _ROW_BUCKETS[-1]:
            return None
        bucket, padded = next(one for one in _ROW_BUCKETS if one >= rows), _LEAST_WIDTH
        while padded < width:
            padded *= 4
        return self._capture(bucket, min(padded, self._tables.shape[1]))

    def _capture(self, rows: int, width: int) -> "CapturedStep | None":
        if (rows, width) not in self._captured:
            assert self.recorder is not None
            sizes = (rows, rows, width, rows, rows)

            def run(inputs: Tensor) -> Tensor:
                return self._run(inputs, *sizes, True)

            count = 4 * rows + (rows + 1) + rows + rows * width + rows
            inputs = torch.zeros(count, dtype=torch.int32, device=self.device)
            inputs[2 * rows : 3 * rows] = -1  # nothing is stored
            inputs[4 * rows : 5 * rows + 1] = torch.arange(rows + 1)
            begun = perf_counter()
            try:
                self._captured[rows, width] = CapturedStep(run, inputs, rows, width, self.recorder)
                self.capture_s += perf_counter() - begun
            except RuntimeError as error:
                # The usual cause is a lack of memory. Steps can run without the capture.
                self.recorder = None
                why = f"the capture of a CUDA graph failed: {first_line(error)}"
                warnings.warn(f"tokens are generated slowly, because {why}.", stacklevel=2)
                return None
        return self._captured[rows, width]

    def _sent(self, numbers: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(numbers)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class CapturedStep:
    """A decode step of `rows` rows, some of which may be padding, with tables of `width` pages."""

    def __init__(
        self, run: Callable[[Tensor], Tensor], inputs: Tensor, rows: int, width: int, recorder: GraphCapturer
    ) -> None:
        self.rows, self.width = rows, width
        self._inputs = inputs
        # The graph copies the logits out of the memory pool, because other graphs use the same pool.
        self._logits_NV = torch.empty_like(recorder.warm_up(lambda: run(inputs)))
        for _ in range(_WARMUPS - 1):
            recorder.warm_up(lambda: run(inputs))
        self._replay = recorder.capture(lambda: self._logits_NV.copy_(run(inputs)))[1]

    def run(self, inputs: np.ndarray) -> Tensor:
        """Returns the logits, in a buffer that the next call overwrites."""
        tensor = torch.from_numpy(inputs)
        if self._inputs.is_cuda:
            tensor = tensor.pin_memory()
        self._inputs.copy_(tensor, non_blocking=True)
        self._replay()
        return self._logits_NV
