"""Sizes × plans of the live model, each run as a stream runs it: from frames in main memory to finished pictures there.

A frame counts once, with all of its sampling steps and both copies; what is set up before the first frame does not
count, and neither do the first frames. Every arm feeds on its own output, and its pictures are held against those of
the plain fp32 arm frame by frame, so that an error which grows is seen. The arms share a process: what one leaves
behind is let go of before the next, and where the device itself is lost the row of that arm says so and is the last.
"""

import copy
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.machine.machine import Machine
from redline.machine.memory import is_out_of_memory
from redline.models.lsd import SIZES, Lsd, load_lsd
from redline.models.samplers.distilled import MOST_STEPS
from redline.stream.clock import SystemClock
from redline.stream.device_peaks import DevicePeaks, is_lost
from redline.stream.endpoints import EndpointOptions, open_source
from redline.stream.engine import Engine
from redline.stream.frames import Frame
from redline.stream.latency import FrameTimes, Latency
from redline.stream.loading import SHIPPED
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Pipeline
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks.null import NullSink
from redline.stream.sources import Source
from redline.stream.sources.synthetic import SyntheticClip

# Left out of the times: caches are cold, and clocks are low.
WARM_UP_FRAMES = 30
# A picture of fresh weights is its frame with a change; this keeps the change the size of a restoration.
_CHANGE = 0.1


@dataclass(frozen=True)
class Arm:
    """A plan for the U-Net, whether a frame is recorded as one CUDA graph, and whether frames are read, computed and
    written side by side, as a stream does it, or one after the other, as a plain loop would."""

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
    # As the stream's shipped plan is.
    Arm("bf16 + channels_last + graph", "bf16 + channels_last", graph=True),
    Arm("fp16 + channels_last + compile + graph", "fp16 + channels_last + compile", graph=True),
)
# The shipped plan last: what it tells the allocator cannot be taken back.
CPU_ARMS = (
    PLAIN,
    Arm("channels_last", "channels_last"),
    Arm("compile", "compile"),
    Arm("channels_last + keep_memory", "channels_last + keep_memory"),
)


@dataclass(frozen=True)
class Shape:
    """What is run: a size of model, the side of its pictures, steps a frame, and how many frames; of a film, or of a
    clip that is made on the spot. `weights` are fresh, or for tiny the shipped ones."""

    size: str = "tiny"
    side: int = 64
    steps: int = 1
    frames: int = 500
    film: str = ""
    weights: str = "fresh"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise RedlineError(f"there is no LSD of size {self.size!r}: choose from {', '.join(SIZES)}.")
        for name in ("side", "steps", "frames"):
            if type(getattr(self, name)) is not int:
                raise RedlineError(f"{name} is a whole number, not {getattr(self, name)!r}.")
        if self.side < 1 or self.frames <= 2 * WARM_UP_FRAMES:
            least = 2 * WARM_UP_FRAMES + 1
            raise RedlineError(
                f"a side is 1 pixel or more and frames are {least} or more, not {self.side}, {self.frames}."
            )
        if self.film and not Path(self.film).is_file():
            raise RedlineError(f"there is no film {self.film!r}.")
        if self.weights not in ("fresh", "shipped") or (self.weights == "shipped" and self.size != "tiny"):
            raise RedlineError(f"weights are fresh, or shipped for tiny, not {self.weights!r} for {self.size}.")
        Settings(1.0, self.steps)
        if self.steps > MOST_STEPS:
            raise RedlineError(f"the distilled sampler takes 1 to {MOST_STEPS} steps, not {self.steps}.")

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Shape":
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            names = f"{', '.join(known[:-1])} and {known[-1]}"
            raise RedlineError(f"{unknown[0]!r} is no option of the live model: there are {names}.")
        if "film" in options:  # which may be called 1
            options = {**options, "film": str(options["film"])}
        return cls(**options)


@dataclass(frozen=True)
class Row:
    """Times in milliseconds: `model_ms` is the device's (on a CPU the host's) for one frame without its copies,
    `frame_ms` from one finished frame to the next, and the percentiles are of latencies from capture to sink.
    `plan` is the arm's as it came out. `peak_bytes` is what a running stream takes of the device, weights included;
    loading, converting and compiling may have taken more before, `setup_peak_bytes`. `grown_bytes` is the most that a
    GPU held at any frame behind the first beyond the least, in a pass that is not timed. `psnr_db` is against the plain
    arm; the least of all frames, and the mean. After a row with `device_lost` nothing more can run."""

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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Pictures(NullSink):
    """Keeps what comes, or holds it against what was kept."""

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
    """Of bytes; equal ones count as 200, as the ladder's gates have it."""
    return 10 * math.log10(255**2 / error) if error else 200.0


def measure(
    shape: Shape,
    arms: Sequence[Arm],
    device: torch.device,
    weights: Lsd | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """A row for each arm, the plain one first; one that cannot run says why. Without the plain arm there is nothing to
    hold the others against, so its failure is the last row."""
    if weights is None:
        weights = load_lsd(SHIPPED) if shape.weights == "shipped" else fresh_model(shape.size)
    model = weights
    machine, expected = Machine.detect(str(device)), []
    for arm in (PLAIN, *(arm for arm in arms if arm != PLAIN)):
        say(f"{shape.size} at {shape.side}×{shape.side}: {arm.name}")
        plan = Plan.parse(arm.plan)
        row = Row(shape, arm, str(device), sum(weight.numel() for weight in model.parameters()))
        reason = next((f"{r.name}: {why}" for r in plan.rungs if (why := r.why_not(machine))), "")
        if reason:
            yield replace(row, failure=reason)
            continue
        try:
            row, pictures = _run(row, plan, copy.deepcopy(model), device, expected)
        except (RedlineError, RuntimeError) as error:
            row = _failed(row, error)
            yield row
            if arm == PLAIN or row.device_lost:
                return
            continue
        expected = pictures or expected
        if arm in arms:
            yield row


def fresh_model(size: str) -> Lsd:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Lsd(SIZES[size]).eval()
    with torch.no_grad():
        model.head.weight.mul_(_CHANGE)
    return model


class _Timing(Engine):
    """Keeps how long the device was busy with each frame, and while it `weighs` what it held of memory then: to ask for
    that takes the host's time, which is not to be in any other."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.each_s: list[float] = []
        self.weighs, self.held_bytes = True, list[int]()

    def finish(self) -> Tensor:
        before_s = self.busy_s
        pixels = super().finish()
        self.each_s.append(self.busy_s - before_s)
        if self.weighs:
            self.held_bytes.append(_held_bytes(self.model.device))
        return pixels


def _run(row: Row, plan: Plan, model: Lsd, device: torch.device, expected: list[Tensor]) -> tuple[Row, list[Tensor]]:
    shape, settings = row.shape, Settings(1.0, row.shape.steps)
    memory = DevicePeaks(device)
    # Without a recorder a frame is not recorded.
    recorder: dict[str, Any] = {} if row.arm.graph else {"recorder": lambda _device: None}
    frames = LsdFrames(model, plan, device)
    engine = _Timing(frames, settings, **recorder)

    def stream(sink: NullSink, latency: Latency) -> None:
        source = _source(shape)
        try:
            if row.arm.overlapped:
                Pipeline(source, engine, sink, settings=LiveSettings(settings), latency=latency).run()
            else:
                _plain_loop(source, engine, sink, settings, latency)
        finally:
            source.close()

    pictures = _Pictures(expected)
    stream(pictures, Latency())
    if pictures.frames < shape.frames:
        raise RedlineError(f"{shape.film!r} has {pictures.frames} frames, and {shape.frames} are asked for.")
    setup_s, setup_peak_bytes, engine.weighs = engine.setup_s, memory.take(), False
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
    if pictures.errors:
        row = replace(row, least_psnr_db=_psnr_db(max(pictures.errors)), mean_psnr_db=_psnr_db(fmean(pictures.errors)))
    return row, pictures.kept


def _plain_loop(source: Source, engine: Engine, sink: NullSink, settings: Settings, latency: Latency) -> None:
    """What anybody would write first: read a frame, compute it, write it, one after the other. Films are decoded as for
    any other arm."""
    now_s = SystemClock().now_s
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
    if not shape.film:
        return SyntheticClip(shape.side, shape.side, shape.frames)
    return _First(open_source(shape.film, EndpointOptions(size=(shape.side, shape.side))), shape.frames)


class _First:
    """The first frames of a film: pictures are kept to be compared, and those of a whole one may not fit."""

    is_live = False

    def __init__(self, source: Source, count: int) -> None:
        self.name, self.rate, self.height, self.width = source.name, source.rate, source.height, source.width
        self._source, self._count = source, count

    def frames(self) -> Generator[Frame, None, None]:
        with closing(self._source.frames()) as frames:
            yield from islice(frames, self._count)

    def close(self) -> None:
        self._source.close()


def _held_bytes(device: torch.device) -> int:
    """Of tensors and of the allocator's pools; a CPU's allocators tell nothing of the kind."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(device) + torch.cuda.memory_reserved(device)


def _failed(row: Row, error: Exception) -> Row:
    said = str(error).strip().splitlines() or [type(error).__name__]
    text = "out of memory" if is_out_of_memory(error) else said[0].rstrip(".")
    if is_lost(torch.device(row.device)):
        return replace(row, failure=f"{text}; the device is lost, what is left needs a new start", device_lost=True)
    return replace(row, failure=text)
