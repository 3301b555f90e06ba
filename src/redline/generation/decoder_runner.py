"""Runs planned steps of a paged model: calls the model once with the new tokens of all rows, then samples once.

Sampled tokens stay on the device as inputs of the next step, so that a step can be launched before the host has read
the tokens of the step before. Steps in which every row decodes are captured as CUDA graphs, and so are short steps with
prompts. The numbers of tokens, rows and pages are rounded up to buckets, and each combination of buckets has its own
graph. A captured launch gets only bucket sizes as Python numbers; all other numbers are in tensors.

T: tokens of a step, R: its rows, N: sampled tokens, W: pages in the table of a row.
"""

import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

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
from redline.ops.paged_attention import ALL, PagedRows

Masks = Sequence[bytes | None]
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
# The numbers of tokens, and of rows, of captured steps with prompts. Larger steps are not captured, because their
# kernels run longer than the host takes to launch them.
_TOKEN_BUCKETS = (64, 128, 256, 512, 1024, 2048)
_MIXED_ROWS = (8, 64, 256)
# A row's table in a captured step has this number of pages times a power of four, up to the longest table.
_LEAST_WIDTH = 32
_WARMUPS = 2
# Attention of a row that decodes is computed in at most `_MOST_SPLITS` parts of at least `_LEAST_SPLIT` positions.
_MOST_SPLITS, _LEAST_SPLIT = 64, 256


class Shape(NamedTuple):
    """The sizes of a step. `width` is the number of pages in the table of each row."""

    tokens: int
    rows: int
    width: int
    # Whether every row has one token and samples.
    is_decode: bool


class DecoderRunner:
    """Runs steps with up to `rows` rows of up to `context` tokens each, whose keys and values are in `pool`.

    Without a `recorder`, no step is captured as a CUDA graph.
    """

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
        # The number of pages that `_tables` holds for each row.
        self._held = [0] * rows
        self._last_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._split = max(_LEAST_SPLIT, -(-context // _MOST_SPLITS))
        self._captured: dict[Shape, CapturedStep] = {}
        self._logits_RV: Tensor | None = None
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
        # Replaces NO_TOKEN by token 0, because the next step may be launched before the host reads NO_TOKEN.
        self._last_R[rows_N] = sampled.tokens_N.clamp(min=0).int()
        return Readback(sampled, self.device)

    def warm_up(self, rows: int) -> None:
        """Captures the steps of short texts with up to `rows` rows, so that no request waits for a capture."""
        width = min(_LEAST_WIDTH, self._tables.shape[1])
        # Captures the largest step first, because later captures reuse its memory.
        for tokens in reversed(_TOKEN_BUCKETS):
            self._capture(Shape(tokens, _MIXED_ROWS[0], width, False))
        for bucket in reversed([one for one in _ROW_BUCKETS if one < 2 * rows]):
            self._capture(Shape(bucket, bucket, width, True))

    def _logits(self, plan: StepPlan) -> Tensor:
        rows = plan.rows
        counts = np.array([row.count for row in rows], dtype=np.int32)
        lengths = np.array([row.start for row in rows], dtype=np.int32)
        width = int((lengths + counts - 1).max()) // self.size + 1
        shape = Shape(int(counts.sum()), len(rows), width, plan.is_decode)
        captured = self._captured_step(shape, plan)
        if captured is not None:
            logits_RV = captured.run(self._inputs(rows, counts, lengths, captured.shape, is_captured=True))
            sampling = [index for index, row in enumerate(rows) if row.samples]
            if len(sampling) == len(rows):
                return logits_RV[: len(rows)]
            return logits_RV[self._sent(np.array(sampling, dtype=np.int64))]
        inputs = self._sent(self._inputs(rows, counts, lengths, shape, is_captured=False))
        samples, singles = sum(row.samples for row in rows), ALL if plan.is_decode else int((counts == 1).sum())
        return self._run(inputs, shape, samples, singles, singles)

    def _run(self, inputs: Tensor, shape: "Shape", samples: int, singles: int, prompts: int) -> Tensor:
        """Calls the model with the inputs that `_inputs` packed."""
        tokens, rows, width, is_decode = shape
        sizes = (tokens, tokens, tokens, tokens, rows + 1, rows, rows * width, samples)
        tokens_T, positions_T, slots_T, rows_T, starts_E, lengths_R, tables, sampled_N = inputs.split(sizes)
        tokens_T = torch.where(tokens_T < 0, self._last_R[rows_T], tokens_T)
        numbers = (slots_T, starts_E, lengths_R, tables.view(rows, width))
        paged = PagedRows(*numbers, singles=singles, prompts=prompts, split=self._split)
        return self.model.flat(tokens_T, FlatCall(positions_T, sampled_N, paged, self.pool), is_decode)

    def _inputs(
        self, rows: list[PlannedRow], counts: np.ndarray, lengths: np.ndarray, shape: "Shape", is_captured: bool
    ) -> np.ndarray:
        """Returns all numbers of a step in one array, so that there is one copy to the device.

        A captured step returns logits after the last token of every row. If it is a decode step, a row of padding has
        one token, otherwise none. Keys and values of padding are not stored (slot −1).
        """
        ids = np.array([row.row for row in rows], dtype=np.int32)
        real, padding = int(counts.sum()), shape.rows - len(rows)
        ends = np.zeros(shape.rows + 1, dtype=np.int32)
        ends[1:] = np.pad(counts, (0, padding), constant_values=int(shape.is_decode)).cumsum()
        tables = np.zeros((shape.rows, shape.width), dtype=np.int32)
        tables[: len(rows)] = self._tables[ids, : shape.width]
        of_token = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(real, dtype=np.int32) - ends[of_token] + lengths[of_token]
        slots = tables[of_token, positions // self.size] * self.size + positions % self.size
        tokens = [token for row in rows for token in row.input_tokens()]
        if is_captured:
            sampled = np.maximum(ends[1:] - 1, 0)
        else:
            sampled = [
                end - left for row, end in zip(rows, ends[1:], strict=False) for left in range(row.samples, 0, -1)
            ]
        zeros = np.zeros(shape.tokens - real, dtype=np.int32)
        parts = (
            *(tokens, zeros, positions, zeros, slots, zeros - 1, ids[of_token], zeros),
            *(ends, lengths, np.zeros(padding), tables.ravel(), sampled),
        )
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])

    def _captured_step(self, shape: "Shape", plan: StepPlan) -> "CapturedStep | None":
        """Returns the captured step whose buckets fit the shape, or None if such steps are not captured."""
        if self.recorder is None or any(row.drafts for row in plan.rows):
            return None
        row_buckets = _ROW_BUCKETS if plan.is_decode else _MIXED_ROWS
        rows = next((one for one in row_buckets if one >= shape.rows), None)
        tokens = rows if plan.is_decode else next((one for one in _TOKEN_BUCKETS if one >= shape.tokens), None)
        if rows is None or tokens is None:
            return None
        width = _LEAST_WIDTH
        while width < shape.width:
            width *= 4
        return self._capture(Shape(tokens, rows, min(width, self._tables.shape[1]), plan.is_decode))

    def _capture(self, shape: "Shape") -> "CapturedStep | None":
        if shape in self._captured or self.recorder is None:
            return self._captured.get(shape)
        tokens, rows, width, is_decode = shape

        def run(inputs: Tensor) -> Tensor:
            # The graph serves any mix of rows with one token and with more, so the kernels must allow both per row.
            return self._run(inputs, shape, rows, ALL, ALL if is_decode else 0)

        # Example inputs: rows of one token, or a single long row. Slots of −1 make the kernels store nothing.
        longest = min(tokens, width * self.size)
        inputs = torch.zeros(4 * tokens + 3 * rows + 1 + rows * width, dtype=torch.int32, device=self.device)
        inputs[2 * tokens : 3 * tokens] = -1
        inputs[4 * tokens : 4 * tokens + rows + 1] = torch.arange(rows + 1) if is_decode else longest
        inputs[4 * tokens] = 0
        begun = perf_counter()
        try:
            if self._logits_RV is None:
                logits_RV = self.recorder.warm_up(lambda: run(inputs))
                self._logits_RV = logits_RV.new_empty((max(_ROW_BUCKETS[-1], _MIXED_ROWS[-1]), logits_RV.shape[1]))
            self._captured[shape] = CapturedStep(run, inputs, shape, self._logits_RV[:rows], self.recorder)
        except RuntimeError as error:
            # The usual cause is a lack of memory. Steps also run without CUDA graphs.
            self.recorder = None
            why = f"the capture of a CUDA graph failed: {first_line(error)}"
            warnings.warn(f"tokens are generated slowly, because {why}.", stacklevel=2)
        self.capture_s += perf_counter() - begun
        return self._captured.get(shape)

    def _sent(self, numbers: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(numbers)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


class CapturedStep:
    """A CUDA graph of a step of one shape, which pads tokens and rows. All graphs share the buffer of logits."""

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        inputs: Tensor,
        shape: Shape,
        logits_RV: Tensor,
        recorder: GraphCapturer,
    ) -> None:
        self.shape, self._inputs, self._logits_RV = shape, inputs, logits_RV
        for _ in range(_WARMUPS):
            recorder.warm_up(lambda: run(inputs))
        self._replay = recorder.capture(lambda: logits_RV.copy_(run(inputs)))[1]

    def run(self, inputs: np.ndarray) -> Tensor:
        """Returns the logits of each row, in a buffer that the next step overwrites."""
        tensor = torch.from_numpy(inputs)
        if self._inputs.is_cuda:
            tensor = tensor.pin_memory()
        self._inputs.copy_(tensor, non_blocking=True)
        self._replay()
        return self._logits_RV
