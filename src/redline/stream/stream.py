"""A whole stream from what was asked for to what came of it: both ends, the model, the pipeline, and who watches it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from redline.ladder.plan import Plan
from redline.machine.machine import Machine, resolve_device
from redline.stream.endpoints import EndpointOptions, Endpoints, open_endpoints
from redline.stream.engine import CUT_THRESHOLD, Engine
from redline.stream.latency import Latency
from redline.stream.loading import Loaded, load_model
from redline.stream.metrics_file import MetricsFile, check_output_path
from redline.stream.monitor import Monitor, Sample
from redline.stream.pipeline import Outcome, Pipeline
from redline.stream.plans import choose_plan
from redline.stream.report_page import StreamInfo, write_page
from redline.stream.settings import LiveSettings, Settings
from redline.stream.settings_reader import SettingsReader
from redline.stream.sinks.window import WindowSink

# Windows has none.
_HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)


@dataclass(frozen=True)
class Request:
    """None is what the model was made for. `size` is (height, width)."""

    source: str
    sink: str
    model: Path | None = None
    sampler: str | None = None
    prompt: str = ""
    steps: int | None = None
    strength: float | None = None
    seed: int = 0
    control: tuple[float, ...] = ()
    wishes: EndpointOptions = field(default_factory=EndpointOptions)
    precision: str = "auto"
    plan: Plan | None = None
    device: str = "auto"
    reset_at_cuts: bool = False
    duration_s: float | None = None
    metrics: Path | None = None
    report: Path | None = None
    changes: str | None = None


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    about: StreamInfo
    samples: tuple[Sample, ...]
    # Of all frames; none where no frame came.
    whole: Sample | None
    interrupted: bool


class Session:
    """What can be wrong is said when it is made; `run` then runs it, once."""

    def __init__(self, request: Request, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.request, self._say = request, say
        others = {
            "source": request.source,
            "output": request.sink,
            "model": request.model,
            "list of changes": request.changes,
        }
        self._figures = None if request.metrics is None else MetricsFile(request.metrics, others)
        if request.report is not None:
            check_output_path(request.report, {**others, "file of figures": request.metrics})
        self.device = torch.device(resolve_device(request.device))
        plan = choose_plan(Machine.detect(str(self.device)), request.precision, request.plan)
        self.loaded = load_model(request.model, plan, self.device, request.sampler)
        frames = self.loaded.frames
        self.settings = LiveSettings(_settings(request, self.loaded), frames.check)
        self._first_settings = self.settings.now()
        self._changes = None if request.changes is None else SettingsReader(request.changes, self.settings, say)
        self.latency = Latency()
        threshold = CUT_THRESHOLD if request.reset_at_cuts else None
        self.engine = Engine(frames, self.settings.now(), cut_threshold=threshold)
        self._sample: Sample | None = None
        wishes = replace(
            request.wishes,
            most_steps=frames.most_steps,
            control_names=frames.control_names,
            control_least=frames.control_least,
            takes_prompt=frames.takes_prompt,
            device=self.device,
            busy_share=lambda: None if self._sample is None else self._sample.busy_share,
        )
        self.places: Endpoints = open_endpoints(request.source, request.sink, wishes, self.settings, self.latency)

    def run(self, show: Callable[[Sample], None] = lambda sample: None) -> Result:
        """Until the source ends, the time is over, the window is closed, or Ctrl-C. What has come is kept."""
        places, request = self.places, self.request
        for note in places.notes:
            self._say(note)
        pipeline = Pipeline(
            places.source, self.engine, places.sink, settings=self.settings, latency=self.latency, tell=self._say
        )
        if isinstance(places.sink, WindowSink):
            places.sink.on_closed = pipeline.stop

        def seen(sample: Sample) -> None:
            self._sample = sample
            show(sample)

        with ExitStack() as stack:
            stack.callback(places.close)
            if self._figures is not None:
                stack.callback(self._figures.close)
            watch = Monitor(
                self.latency,
                self.engine,
                self.device,
                duration_s=request.duration_s,
                stop=pipeline.stop,
                fail=pipeline.fail,
                show=seen,
                write=(lambda line: None) if self._figures is None else self._figures.write,
            )
            stack.enter_context(_stopped_by_signals(watch.stop_wanted))
            if self._changes is not None:
                stack.enter_context(self._changes)
            with watch:
                outcome = pipeline.run()
        if watch.error is not None:
            raise watch.error
        if broken := self.engine.broken_frames:
            self._say(
                f"{broken:,} frames had values that are not finite, and show the input there: try --precision fp32."
            )
        return Result(outcome, self._about(), tuple(watch.samples), watch.whole, watch.stop_wanted.is_set())

    def write_report(self, result: Result) -> None:
        """The page that was asked for, if one was; apart from `run`, so that what is seen does not depend on it."""
        if self.request.report is not None and result.whole is not None:
            write_page(self.request.report, result.about, result.outcome.report, result.samples, result.whole)

    def _about(self) -> StreamInfo:
        source, settings = self.places.source, self._first_settings
        counted = "1 step" if settings.steps == 1 else f"{settings.steps} steps"
        said = f"strength {settings.strength:g}, {counted}, seed {settings.seed}"
        control = ", ".join(f"{value:g}" for value in settings.control)
        said += f", control {control}" if control else ""
        return StreamInfo(
            source=source.name,
            sink=self.places.sink.name,
            model=self.loaded.frames.name,
            device=Machine.detect(str(self.device)).name if self.device.type == "cuda" else "cpu",
            device_type=self.device.type,
            plan=str(self.loaded.plan),
            size=f"{source.width}×{source.height}",
            settings=f"{said}, prompt “{settings.prompt}”" if settings.prompt else said,
            setup_s=self.engine.setup_s,
        )


def _settings(request: Request, loaded: Loaded) -> Settings:
    strength = loaded.strength if request.strength is None else request.strength
    # As many numbers as have a name, so that a page has a slider for each.
    unset = len(loaded.frames.control_names) - len(request.control)
    control = (*request.control, *[0.0] * max(0, unset))
    steps = loaded.live_steps if request.steps is None else request.steps
    return Settings(strength, steps, request.seed, control, request.prompt)


@contextmanager
def _stopped_by_signals(wanted: threading.Event) -> Iterator[None]:
    """The first Ctrl-C ends the stream as its own end would, and a second one the process. A terminal that is closed
    ends the stream too, however often it says so, unless it was started to outlive it (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if _HANG_UP is not None and signal.getsignal(_HANG_UP) != signal.SIG_IGN:
        before[_HANG_UP] = signal.getsignal(_HANG_UP)

    def note(number: int, _frame: object) -> None:
        wanted.set()
        if number != _HANG_UP:
            signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
