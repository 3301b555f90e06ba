"""Benchmarks the live model for sizes × plans, as a stream runs it: from frames in host memory to results in host
memory.

An arm is a plan and the way in which frames are run with it (`Arm`). Every arm feeds its own output back to the model.
The outputs are compared frame by frame with those of the plain fp32 arm, so that growing errors are detected. The time
of a frame includes all of its sampling steps and both copies, but not the set-up and the warm-up frames.

All arms run in one process, and memory is freed between them. If a CUDA error in an arm makes the device unusable, the
row of that arm reports this and is the last row.
"""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor

from redline.errors import RedlineError, first_line
from redline.files.config_fields import check_fields, decode
from redline.files.limits import PositiveInt
from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.machine.memory import free_cuda_caches, is_out_of_memory
from redline.models.lsd import SIZES, Lsd, load_lsd
from redline.models.samplers import MOST_STEPS
from redline.stream.endpoints import EndpointOptions, open_source
from redline.stream.engine import Engine
from redline.stream.frames import Clock, Frame
from redline.stream.latency import FrameTimes, Latency
from redline.stream.loading import SHIPPED
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Pipeline
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks import NullSink
from redline.stream.sources import Source
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.wrappers import SourceWrapper

# This many frames at the start are not timed, because caches are cold and clock rates are low.
WARM_UP_FRAMES = 30
# Scales the last layer of a model with random weights, so that it changes a frame about as much as a restoration does.
_CHANGE = 0.1


@dataclass(frozen=True)
class Arm:
    """A plan for the U-Net. `graph` captures a frame as one CUDA graph; `overlapped` reads, computes and writes frames
    concurrently, as a stream does, instead of in a plain loop."""

    name: str
    plan: str
    graph: bool = False
    overlapped: bool = True


PLAIN = Arm("fp32", "eager")
ARMS = (
    PLAIN,
    Arm("fp32, plain loop", "eager", overlapped=False),
    Arm("TF32", "tf32"),
    Arm("fp16", "fp16"),
    Arm("bf16", "bf16"),
    Arm("autocast", "autocast"),
    Arm("fp16 + compile", "fp16 + compile"),
    Arm("fp16 + graph", "fp16", graph=True),
    # The bundled plan of the stream on a GPU.
    Arm("bf16 + channels_last + graph", "bf16 + channels_last", graph=True),
    Arm("fp16 + channels_last + compile + graph", "fp16 + channels_last + compile", graph=True),
)
# The bundled plan comes last, because its allocator settings cannot be undone.
CPU_ARMS = (
    PLAIN,
    Arm("channels_last", "channels_last"),
    Arm("compile", "compile"),
    Arm("channels_last + keep_memory", "channels_last + keep_memory"),
)


@dataclass(frozen=True)
class Shape:
    """The workload: model size, side of the frames, steps per frame and number of frames.

    The frames are from the file `video` or from a generated clip. `weights` is `fresh` (random) or, only for the size
    tiny, `shipped` (the bundled weights).
    """

    size: str = "tiny"
    side: PositiveInt = 64
    steps: Annotated[int, Meta(ge=1, le=MOST_STEPS)] = 1
    frames: Annotated[int, Meta(ge=2 * WARM_UP_FRAMES + 1)] = 500
    video: str = ""
    weights: Literal["fresh", "shipped"] = "fresh"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size not in SIZES:
            raise RedlineError(f"unknown LSD size {self.size!r} (supported: {', '.join(SIZES)}).")
        if self.video and not Path(self.video).is_file():
            raise RedlineError(f"video: there is no file {self.video!r}.")
        if self.weights == "shipped" and self.size != "tiny":
            raise RedlineError(f"weights = shipped is not available for size {self.size}, only for tiny: use fresh.")

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Shape":
        if "video" in options:  # a numeric file name may have been parsed as a number
            options = {**options, "video": str(options["video"])}
        return decode(cls, options, "of the live model")


@dataclass(frozen=True)
class Row:
    """The result of one arm; times are in milliseconds.

    `model_ms` is the device's time for one frame without its copies, `frame_ms` the time between finished frames, and
    the percentiles are of latencies from capture to sink. `plan` is the resolved plan. `peak_bytes` is the peak device
    memory of the running stream with its weights, and `setup_peak_bytes` that of loading and compiling. `grown_bytes`
    is the largest minus the smallest GPU memory held after a frame (without warm-up), in an untimed pass. The PSNR
    values compare with the plain arm: minimum and mean over frames. After a row with `device_lost` nothing can run.
    """

    shape: Shape
    arm: Arm
    device: str
    parameters: int = 0
    plan: str = ""
    model_ms: float = 0.0
    frame_ms: float = 0.0
    frames_per_s: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    peak_bytes: int = 0
    setup_peak_bytes: int = 0
    grown_bytes: int | None = None
    least_psnr_db: float | None = None
    mean_psnr_db: float | None = None
    setup_s: float = 0.0
    failure: str = ""
    device_lost: bool = False


class _Comparison(NullSink):
    """A sink that stores the frames of the plain arm, or compares the frames of another arm with them."""

    def __init__(self, expected: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._expected, self.kept, self.errors = expected, list[Tensor](), list[float]()

    def write(self, frame: Frame) -> None:
        if self._expected:
            self.errors.append((frame.pixels.float() - self._expected[self.frames].float()).square().mean().item())
        else:
            self.kept.append(frame.pixels)
        super().write(frame)


def _psnr_db(error: float) -> float:
    """Returns the PSNR for a mean squared error of bytes; 200 for equal images, as in the ladder's gates."""
    return 10 * math.log10(255**2 / error) if error else 200.0


def measure(
    shape: Shape,
    arms: Sequence[Arm],
    device: torch.device,
    weights: Lsd | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """Yields a row for each arm; the row of an arm that cannot run gives the reason.

    The plain arm runs first, because the others are compared with it; if it fails, its row is the last one.
    """
    model = weights or (load_lsd(SHIPPED) if shape.weights == "shipped" else fresh_model(shape.size))
    machine, expected = Machine.detect(str(device)), []
    for arm in (PLAIN, *(arm for arm in arms if arm != PLAIN)):
        log(f"{shape.size} at {shape.side}×{shape.side}: {arm.name}")
        plan = Plan.parse(arm.plan)
        row = Row(shape, arm, str(device), sum(weight.numel() for weight in model.parameters()))
        reason = next((f"{r.name}: {why}" for r in plan.rungs if (why := r.why_not(machine))), "")
        if reason:
            yield replace(row, failure=reason)
            continue
        try:
            row, images = _run(row, plan, copy.deepcopy(model), device, expected)
        except (RedlineError, RuntimeError) as error:
            row, images = _failed(row, error), []
        expected = images or expected
        if row.failure or arm in arms:
            yield row
        if row.device_lost or (row.failure and arm == PLAIN):
            return


def fresh_model(size: str) -> Lsd:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Lsd(SIZES[size]).eval()
    with torch.no_grad():
        model.head.weight.mul_(_CHANGE)
    return model


class DevicePeaks:
    """Measures the peak device memory of successive runs in one process, above the memory that was allocated at
    construction. Always 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda, self._held_bytes = device, device.type == "cuda", 0
        if self._is_cuda:
            # Compiled code and captured graphs keep references to weights until the compiler is reset.
            torch.compiler.reset()
            free_cuda_caches()
            self._held_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> int:
        """Returns the peak since the previous call or the construction."""
        if not self._is_cuda:
            return 0
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak - self._held_bytes


class _Timing(Engine):
    """Records the device time of each frame and, if `samples_memory`, the memory in use (reading it takes time)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.each_s: list[float] = []
        self.samples_memory, self.held_bytes = True, list[int]()

    def finish(self) -> Tensor:
        before_s = self.busy_s
        pixels = super().finish()
        self.each_s.append(self.busy_s - before_s)
        if self.samples_memory:
            self.held_bytes.append(_held_bytes(self.model.device))
        return pixels


def _run(row: Row, plan: Plan, model: Lsd, device: torch.device, expected: list[Tensor]) -> tuple[Row, list[Tensor]]:
    shape, settings = row.shape, Settings(1.0, row.shape.steps)
    memory = DevicePeaks(device)
    # An engine on a GPU captures a CUDA graph unless it is given a function that returns no recorder.
    recorder: dict[str, Any] = {} if row.arm.graph else {"recorder": lambda _device: None}
    frames = LsdFrames(model, plan, device)
    engine = _Timing(frames, settings, **recorder)

    def stream(sink: NullSink, latency: Latency) -> None:
        with closing(_source(shape)) as source:
            if row.arm.overlapped:
                Pipeline(source, engine, sink, settings=LiveSettings(settings), latency=latency).run()
            else:
                _plain_loop(source, engine, sink, settings, latency)

    sink = _Comparison(expected)
    stream(sink, Latency())
    if sink.frames < shape.frames:
        raise RedlineError(f"{shape.video!r} has only {sink.frames} frames, not {shape.frames}.")
    setup_s, setup_peak_bytes, engine.samples_memory = engine.setup_s, memory.take(), False
    timed = Latency(window=shape.frames - WARM_UP_FRAMES)
    stream(NullSink(), timed)
    report, held_bytes = timed.report(), engine.held_bytes[WARM_UP_FRAMES:]
    row = replace(
        row,
        plan=str(frames.plan),
        model_ms=1e3 * fmean(engine.each_s[WARM_UP_FRAMES - shape.frames :]),
        frame_ms=1e3 / report.frames_per_s,
        frames_per_s=report.frames_per_s,
        p50_ms=1e3 * report.latency.p50_s,
        p95_ms=1e3 * report.latency.p95_s,
        p99_ms=1e3 * report.latency.p99_s,
        peak_bytes=memory.take(),
        setup_peak_bytes=setup_peak_bytes,
        grown_bytes=max(held_bytes) - min(held_bytes) if device.type == "cuda" else None,
        setup_s=setup_s,
    )
    if sink.errors:
        row = replace(row, least_psnr_db=_psnr_db(max(sink.errors)), mean_psnr_db=_psnr_db(fmean(sink.errors)))
    return row, sink.kept


def _plain_loop(source: Source, engine: Engine, sink: NullSink, settings: Settings, latency: Latency) -> None:
    """Runs the naive loop: reads, computes and writes one frame after the other."""
    now_s = Clock().now_s
    engine.prepare(source.height, source.width)
    for frame in source.frames():
        offered_s = now_s()
        pixels = engine(replace(frame, settings=settings))
        copy_in_s, copy_out_s = engine.copies_s
        made_s = now_s()
        sink.write(replace(frame, pixels=pixels))
        shown_s, compute_s = now_s(), made_s - offered_s - copy_in_s - copy_out_s
        spent = offered_s - frame.captured_s, 0.0, copy_in_s, compute_s, copy_out_s, shown_s - made_s
        latency.record(FrameTimes(*spent, shown_s))


def _source(shape: Shape) -> Source:
    if not shape.video:
        return SyntheticClip(shape.side, shape.side, shape.frames)
    return _First(open_source(shape.video, EndpointOptions(size=(shape.side, shape.side))), shape.frames)


class _First(SourceWrapper):
    """Limits a video to its first frames, because the comparison keeps all frames in memory."""

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source)
        self._count = count

    def frames(self) -> Generator[Frame, None, None]:
        with closing(self.inner.frames()) as frames:
            yield from islice(frames, self._count)


def _held_bytes(device: torch.device) -> int:
    """Returns allocated plus reserved bytes, so that growth of either shows; 0 on a CPU, where both are unknown."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(device) + torch.cuda.memory_reserved(device)


def is_lost(device: torch.device) -> bool:
    """Returns whether a CUDA error has made the device unusable for the rest of the process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _failed(row: Row, error: Exception) -> Row:
    text = "out of memory" if is_out_of_memory(error) else first_line(error)
    if is_lost(torch.device(row.device)):
        return replace(row, failure=f"{text}; the device is lost, start again for the remaining arms", device_lost=True)
    return replace(row, failure=text)
