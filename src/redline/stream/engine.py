"""Runs a model on every frame of a stream, in memory that stays: on a GPU one recorded graph a frame, on a CPU the
same code without it.

A graph belongs to a size and a number of steps. Another strength, seed or control is written into the buffers that it
reads, behind the frame under way. A sampler of few steps has all of its graphs before the first frame, so that moving
the slider never stalls; of one that takes more, another number of steps is recorded when its first frame comes, and
kept.

At a strength of 0 a frame is passed on as it came, and the model does not run.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redline.cuda_graphs import CudaRecorder, Recorder
from redline.errors import RedlineError
from redline.machine.memory import is_out_of_memory
from redline.stream.frame_buffers import FrameBuffers
from redline.stream.frame_model import FrameModel, FrameProgram
from redline.stream.frames import Frame
from redline.stream.memory_check import check_fits
from redline.stream.settings import Settings
from redline.stream.transfers import PLACES, CudaTransfers, Fetched, HostTransfers, Transfers

# How different two frames look, of 2, when one is of another scene: (mean absolute difference of thumbnails).
CUT_THRESHOLD = 0.35
_REHEARSALS = 2
# With so many numbers of steps or fewer, each is made ready before the first frame.
_MOST_AHEAD = 4
# Numbers of steps whose programs are kept; whoever moves a slider through more of them records again.
_MOST_PROGRAMS = 8


@dataclass(eq=False)
class _Playing:
    program: FrameProgram
    play: Callable[[], None]
    tuned: Settings


class Engine:
    """A `Transform` that also overlaps: `begin` a frame before the one before it is finished with `finish`.

    `settings` are those that it is warmed up with; `cut_threshold` None never forgets the last output by itself.
    """

    def __init__(
        self,
        model: FrameModel,
        settings: Settings | None = None,
        *,
        cut_threshold: float | None = None,
        recorder: Callable[[torch.device], Recorder] | None = None,
    ) -> None:
        self.model, self.busy_s, self.setup_s, self.recordings = model, 0.0, 0.0, 0
        self.copies_s = (0.0, 0.0)
        # On the host a frame is over when it has begun.
        self.most_under_way = PLACES if model.device.type == "cuda" else 1
        self._settings, self._cut_threshold = settings or Settings(), cut_threshold
        cuda = model.device.type == "cuda"
        self._make_recorder = recorder or (CudaRecorder if cuda else None)
        self._computing = torch.cuda.Stream(model.device) if cuda else None
        self._recorder: Recorder | None = None
        self._canvas: FrameBuffers | None = None
        self._transfers: Transfers | None = None
        self._playing: dict[int, _Playing] = {}
        self._broken = 0
        # Frames that were begun: the pixels of those that are passed on, None for those that are computed.
        self._under_way: deque[Tensor | None] = deque()
        self._was_passed_on = False
        model.check(self._settings)

    def check(self, settings: Settings) -> None:
        """Refuses settings before a frame meets them; from any thread."""
        self.model.check(settings)

    @torch.inference_mode()
    def prepare(self, height: int, width: int) -> None:
        """What was of another size is let go first: the two need not fit side by side."""
        began_s = time.perf_counter()
        self._broken = self.broken_frames
        if self._computing is not None:
            torch.cuda.synchronize(self.model.device)
        self._playing.clear()
        self._under_way.clear()
        self._canvas = self._transfers = self._recorder = None
        if self._computing is not None:
            torch.cuda.empty_cache()
        check_fits(self.model, height, width)
        try:
            with self._on_stream():
                self._canvas = FrameBuffers(self.model, height, width, self._cut_threshold)
                self._recorder = self._make_recorder(self.model.device) if self._make_recorder else None
                if isinstance(self._recorder, CudaRecorder) and self._computing is not None:
                    # Libraries keep work spaces for each stream that they have met: one is enough.
                    self._recorder.stream = self._computing
                self._transfers = self._make_transfers(self._canvas)
                [self._ready(settings) for settings in self._ahead()][-1].play()
                self._canvas.reset()
                self._canvas.broken.zero_()
            if self._computing is not None:
                self._computing.synchronize()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = f"{self.model.name} does not fit for pictures of {width}×{height}: give a smaller --size."
            raise RedlineError(text) from error
        self.setup_s = time.perf_counter() - began_s

    @torch.inference_mode()
    def begin(self, frame: Frame) -> None:
        canvas, transfers = self._canvas, self._transfers
        if canvas is None or transfers is None or (frame.height, frame.width) != (canvas.height, canvas.width):
            raise RedlineError(f"the engine is not prepared for pictures of {frame.width}×{frame.height}.")
        if not frame.settings.strength:
            self._under_way.append(frame.pixels)
            self._was_passed_on = True
            return
        with self._on_stream():
            if self._was_passed_on:
                # The model has not seen the frame before this one.
                canvas.reset()
                self._was_passed_on = False
            playing = self._ready(frame.settings)
        transfers.begin(frame.pixels, playing.play)
        self._under_way.append(None)

    def is_done(self) -> bool:
        assert self._transfers is not None
        return self._under_way[0] is not None or self._transfers.is_done()

    def finish(self) -> Tensor:
        """The pixels of the oldest frame that was begun."""
        assert self._transfers is not None
        passed_on = self._under_way.popleft()
        if passed_on is not None:
            self.copies_s = (0.0, 0.0)
            return passed_on
        fetched: Fetched = self._transfers.finish()
        self.copies_s = (fetched.copy_in_s, fetched.copy_out_s)
        self.busy_s += fetched.busy_s
        return fetched.pixels

    def __call__(self, frame: Frame) -> Tensor:
        self.begin(frame)
        return self.finish()

    @property
    def broken_frames(self) -> int:
        """Frames in which the model gave values that are not finite, and the input is shown; asks the device."""
        return self._broken + (0 if self._canvas is None else int(self._canvas.broken))

    @torch.inference_mode()
    def reset(self) -> None:
        """The next frame has no history; in the thread that runs the frames."""
        if self._canvas is not None:
            with self._on_stream():
                self._canvas.reset()

    def _ahead(self) -> list[Settings]:
        """What is made ready before the first frame; the settings of the stream come last."""
        now, most = self._settings, self.model.most_steps
        others = [steps for steps in range(1, most + 1) if steps != now.steps] if most <= _MOST_AHEAD else []
        return [*(replace(now, steps=steps) for steps in others), now]

    def _ready(self, settings: Settings) -> _Playing:
        """The program for these settings, with their numbers in its buffers."""
        self._settings = settings
        playing = self._playing.pop(settings.steps, None)
        if playing is None:
            playing = self._made(settings)
        elif playing.tuned != settings:
            playing.program.retune(settings)
            playing.tuned = settings
        # The one used last stands last, and the first is let go.
        self._playing[settings.steps] = playing
        if len(self._playing) > _MOST_PROGRAMS:
            del self._playing[next(iter(self._playing))]
        return playing

    def _made(self, settings: Settings) -> _Playing:
        canvas = self._canvas
        assert canvas is not None
        program = self.model.program(settings.steps, *canvas.padded)
        program.retune(settings)

        def draw() -> None:
            canvas.draw(program)

        if self._recorder is None:
            return _Playing(program, draw, settings)
        # What rehearsals leave behind is no history of the stream.
        kept = [tensor.clone() for tensor in canvas.history]
        for _ in range(_REHEARSALS):
            self._recorder.rehearse(draw)
        for tensor, before in zip(canvas.history, kept, strict=True):
            tensor.copy_(before)
        try:
            _, replay = self._recorder.record(draw)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = (str(error).strip().splitlines() or ["no reason is given"])[0].rstrip(".")
            raise RedlineError(f"a frame of {self.model.name} cannot be recorded as a CUDA graph: {why}.") from error
        self.recordings += 1
        return _Playing(program, replay, settings)

    def _make_transfers(self, canvas: FrameBuffers) -> Transfers:
        if self._computing is None:
            return HostTransfers(canvas.pixels, canvas.made)
        return CudaTransfers(canvas.pixels, canvas.made, self._computing)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._computing) if self._computing is not None else nullcontext()
