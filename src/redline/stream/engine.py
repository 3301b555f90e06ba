"""Runs a model on every frame of a stream: on a GPU by replaying one CUDA graph per frame, on a CPU directly.

A graph is captured for a frame size and a number of steps; strength, seed and control are written into buffers that the
graph reads. If a model supports only few steps, all graphs are captured before the first frame, so that changing the
number of steps never stalls the stream; otherwise, a graph is captured when a frame first needs it, and is kept.

At a strength of 0 a frame is returned unchanged, and the model does not run.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.errors import RedlineError, first_line
from redline.machine.cuda_graphs import CudaGraphCapturer, GraphCapturer
from redline.machine.memory import is_out_of_memory
from redline.stream.frame_model import FrameModel, FrameProgram
from redline.stream.frames import Frame
from redline.stream.memory_check import check_fits
from redline.stream.settings import Settings
from redline.stream.transfers import MAX_IN_FLIGHT, CudaTransfers, HostTransfers
from redline.video.padding_index import reflected

# Scene cuts are detected on thumbnails of this size.
_THUMBNAIL_PX = 16
# If the mean absolute difference of two thumbnails (from 0 to 2) is larger than this, the frames belong to different
# scenes.
CUT_THRESHOLD = 0.35
_WARM_UPS = 2
# If a model supports at most this many steps, the programs for all numbers of steps are prepared before the first
# frame.
_MOST_AHEAD = 4
# The maximum number of prepared programs, one per number of steps; the least recently used one is dropped.
_MOST_PROGRAMS = 8


class FrameBuffers:
    """The device buffers for one frame size, and the computation of one frame from uint8 input to uint8 output.

    All buffers keep their addresses, so that a captured CUDA graph can use them. A side that the model does not support
    is padded by reflection and cropped afterwards.

    If `is_first` is True, the next frame has no predecessor and is used in place of the previous output.

    `nonfinite_frames` counts frames in which the model returned values that are not finite.
    """

    def __init__(self, model: FrameModel, height: int, width: int, cut_threshold: float | None = None) -> None:
        self.height, self.width = height, width
        self.padded = (model.padded_px(height), model.padded_px(width))
        self.cut_threshold = cut_threshold
        device = model.device
        self.input = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        self.output = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
        self.previous = torch.zeros(1, 3, *self.padded, device=device)
        self.is_first = torch.ones((), dtype=torch.bool, device=device)
        self.nonfinite_frames = torch.zeros((), dtype=torch.long, device=device)
        self.thumbnail = torch.zeros(1, 3, _THUMBNAIL_PX, _THUMBNAIL_PX, device=device)
        self._padding_index = None
        if self.padded != (height, width):
            sides = zip(self.padded, (height, width), strict=True)
            self._padding_index = tuple(reflected(0, padded, side).to(device) for padded, side in sides)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The buffers that carry information from one frame to the next."""
        return self.previous, self.is_first, self.thumbnail, self.nonfinite_frames

    def reset(self) -> None:
        self.is_first.fill_(True)

    def compute(self, program: FrameProgram) -> None:
        """Computes `output` from `input` without synchronizing with the device."""
        frame = self._to_image(self.input)
        previous = torch.where(self._starts_anew(frame), frame, self.previous)
        image = program.run(frame, previous).float()
        # Replaces values that are not finite by those of the input, because a NaN in the state would never disappear.
        is_finite = torch.isfinite(image)
        self.nonfinite_frames += ~is_finite.all()
        clean = torch.where(is_finite, image.clamp(-1, 1), frame)
        self.previous.copy_(clean)
        self.is_first.fill_(False)
        cropped = clean[0, :, : self.height, : self.width].permute(1, 2, 0)
        # 128 is 127.5 + 0.5: the conversion to bytes truncates, so the added half makes it round.
        self.output.copy_((cropped * 127.5 + 128).to(torch.uint8))

    def _to_image(self, pixels_HW3: Tensor) -> Tensor:
        if self._padding_index is not None:
            rows, columns = self._padding_index
            pixels_HW3 = pixels_HW3.index_select(0, rows).index_select(1, columns)
        return (pixels_HW3.permute(2, 0, 1)[None].float() * (2 / 255) - 1).contiguous()

    def _starts_anew(self, frame: Tensor) -> Tensor:
        if self.cut_threshold is None:
            return self.is_first
        thumbnail = F.adaptive_avg_pool2d(frame, _THUMBNAIL_PX)
        is_cut = (thumbnail - self.thumbnail).abs().mean() > self.cut_threshold
        self.thumbnail.copy_(thumbnail)
        return self.is_first | is_cut


@dataclass(eq=False)
class _Prepared:
    program: FrameProgram
    run: Callable[[], None]
    settings: Settings


class Engine:
    """Computes a new image from each frame. Used only by the thread that runs the pipeline.

    `begin` may be called for a frame before the previous one is finished, so that copies and computation overlap: at
    most `max_in_flight` frames are begun and not finished. `copies_s` are the seconds that the last finished frame
    spent in copies to the device and back.

    `settings` are used for the warm-up. With `cut_threshold`, the previous output is cleared when the scene changes.
    """

    def __init__(
        self,
        model: FrameModel,
        settings: Settings | None = None,
        *,
        cut_threshold: float | None = None,
        recorder: Callable[[torch.device], GraphCapturer] | None = None,
    ) -> None:
        self.model, self.busy_s, self.setup_s, self.captures = model, 0.0, 0.0, 0
        self.copies_s = (0.0, 0.0)
        cuda = model.device.type == "cuda"
        # On the CPU a frame is complete when `begin` returns.
        self.max_in_flight = MAX_IN_FLIGHT if cuda else 1
        self._settings, self._cut_threshold = settings or Settings(), cut_threshold
        self._make_recorder = recorder or (CudaGraphCapturer if cuda else None)
        self._compute_stream = torch.cuda.Stream(model.device) if cuda else None
        self._recorder: GraphCapturer | None = None
        self._buffers: FrameBuffers | None = None
        self._transfers: HostTransfers | CudaTransfers | None = None
        self._prepared: dict[int, _Prepared] = {}
        self._nonfinite_before = 0
        # For each frame in flight: its pixels if the frame is passed through unchanged, else None.
        self._in_flight: deque[Tensor | None] = deque()
        self._was_passed_through = False
        model.check(self._settings)

    @torch.inference_mode()
    def prepare(self, height: int, width: int) -> None:
        """Allocates buffers for a frame size and warms up. Frees the old buffers first, because both may not fit."""
        began_s = time.perf_counter()
        self._nonfinite_before = self.nonfinite_frames
        if self._compute_stream is not None:
            torch.cuda.synchronize(self.model.device)
        self._prepared.clear()
        self._in_flight.clear()
        self._buffers = self._transfers = self._recorder = None
        if self._compute_stream is not None:
            torch.cuda.empty_cache()
        check_fits(self.model, height, width)
        try:
            with self._on_stream():
                self._buffers = FrameBuffers(self.model, height, width, self._cut_threshold)
                self._recorder = self._make_recorder(self.model.device) if self._make_recorder else None
                if isinstance(self._recorder, CudaGraphCapturer) and self._compute_stream is not None:
                    # Libraries keep a workspace for each CUDA stream, so a stream of the recorder's own would take more
                    # memory.
                    self._recorder.stream = self._compute_stream
                static = self._buffers.input, self._buffers.output
                stream = self._compute_stream
                self._transfers = HostTransfers(*static) if stream is None else CudaTransfers(*static, stream)
                [self._for_settings(settings) for settings in self._settings_ahead()][-1].run()
                self._buffers.reset()
                self._buffers.nonfinite_frames.zero_()
            if self._compute_stream is not None:
                self._compute_stream.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = f"{self.model.name} is out of memory for frames of {width}×{height}: give a smaller --size."
            raise RedlineError(text) from error
        self.setup_s = time.perf_counter() - began_s

    @torch.inference_mode()
    def begin(self, frame: Frame) -> None:
        buffers, transfers = self._buffers, self._transfers
        if buffers is None or transfers is None or (frame.height, frame.width) != (buffers.height, buffers.width):
            raise RedlineError(f"the engine is not prepared for frames of {frame.width}×{frame.height}.")
        if not frame.settings.strength:
            self._in_flight.append(frame.pixels)
            self._was_passed_through = True
            return
        with self._on_stream():
            if self._was_passed_through:
                # The model did not compute the previous frame, so this frame has no predecessor.
                buffers.reset()
                self._was_passed_through = False
            prepared = self._for_settings(frame.settings)
        transfers.begin(frame.pixels, prepared.run)
        self._in_flight.append(None)

    def is_done(self) -> bool:
        """Returns whether `finish` would return without waiting."""
        assert self._transfers is not None
        return self._in_flight[0] is not None or self._transfers.is_done()

    def finish(self) -> Tensor:
        """Returns the output pixels of the oldest frame in flight, uint8 (H, W, 3) on the CPU.

        The tensor is not reused for the next frame, because another thread writes it to the sink later.
        """
        assert self._transfers is not None
        passed_through = self._in_flight.popleft()
        if passed_through is not None:
            self.copies_s = (0.0, 0.0)
            return passed_through
        fetched = self._transfers.finish()
        self.copies_s = (fetched.copy_in_s, fetched.copy_out_s)
        self.busy_s += fetched.busy_s
        return fetched.pixels

    def __call__(self, frame: Frame) -> Tensor:
        self.begin(frame)
        return self.finish()

    @property
    def nonfinite_frames(self) -> int:
        """The number of frames in which the model returned non-finite values. Synchronizes with the device."""
        return self._nonfinite_before + (0 if self._buffers is None else int(self._buffers.nonfinite_frames))

    @torch.inference_mode()
    def reset(self) -> None:
        """Clears the previous output. Must be called in the thread that runs the frames."""
        if self._buffers is not None:
            with self._on_stream():
                self._buffers.reset()

    def _settings_ahead(self) -> list[Settings]:
        """Returns the settings to prepare before the first frame; the stream's own settings come last."""
        now, most = self._settings, self.model.controls.max_steps
        others = [steps for steps in range(1, most + 1) if steps != now.steps] if most <= _MOST_AHEAD else []
        return [*(replace(now, steps=steps) for steps in others), now]

    def _for_settings(self, settings: Settings) -> _Prepared:
        """Returns the program for these settings, after writing the settings into its buffers."""
        self._settings = settings
        prepared = self._prepared.pop(settings.steps, None)
        if prepared is None:
            prepared = self._prepare_program(settings)
        elif prepared.settings != settings:
            prepared.program.retune(settings)
            prepared.settings = settings
        # Programs are ordered by their last use; the first, least recently used one is dropped.
        self._prepared[settings.steps] = prepared
        if len(self._prepared) > _MOST_PROGRAMS:
            del self._prepared[next(iter(self._prepared))]
        return prepared

    def _prepare_program(self, settings: Settings) -> _Prepared:
        buffers = self._buffers
        assert buffers is not None
        program = self.model.program(settings.steps, *buffers.padded)
        program.retune(settings)

        def compute() -> None:
            buffers.compute(program)

        if self._recorder is None:
            return _Prepared(program, compute, settings)
        # The warm-up must not change the state of the stream.
        state = [tensor.clone() for tensor in buffers.state]
        for _ in range(_WARM_UPS):
            self._recorder.warm_up(compute)
        for tensor, before in zip(buffers.state, state, strict=True):
            tensor.copy_(before)
        try:
            _, replay = self._recorder.capture(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            sentence = f"a frame of {self.model.name} cannot be captured as a CUDA graph: {first_line(error)}."
            raise RedlineError(sentence) from error
        self.captures += 1
        return _Prepared(program, replay, settings)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._compute_stream) if self._compute_stream is not None else nullcontext()
