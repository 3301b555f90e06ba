"""`Stream` opens a source, a model and an output, and sends every frame through them."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from redline.errors import RedlineError
from redline.ladder.plan import Plan, read_plan
from redline.ladder.plans.choose import choose_plan
from redline.machine.machine import Machine, resolve_device
from redline.stream.endpoints import EndpointOptions, Endpoints, open_endpoints, serves_viewers
from redline.stream.engine import CUT_THRESHOLD, Engine
from redline.stream.frames import Frame
from redline.stream.latency import Latency
from redline.stream.loading import load_model
from redline.stream.metrics_file import MetricsFile
from redline.stream.monitor import Monitor, Sample
from redline.stream.pipeline import Pipeline
from redline.stream.report_page import StreamInfo, StreamResult
from redline.stream.settings import LiveSettings, Settings, SettingsReader
from redline.stream.sinks.displays import WindowSink
from redline.stream.sinks.image_folder import ImageFolderSink
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.viewer_key import read_key

_logger = logging.getLogger(__name__)
# Windows has no SIGHUP.
_HANG_UP: signal.Signals | None = getattr(signal, "SIGHUP", None)


class Stream:
    """Runs a diffusion model on video from a file, a camera or the network, and sends the result to a file, a page or a
    window.

    >>> import redline
    >>> result = redline.Stream("synthetic:32x24,0.2", "restored.mp4", device="cpu", plan="eager").run()
    >>> result.frames, dict(result.dropped), result.output.name
    (5, {}, 'restored.mp4')

    Iterating computes one frame at a time in the calling thread, and drops none:

    >>> with redline.Stream("synthetic:32x24,0.2", device="cpu", plan="eager") as stream:
    ...     for frame in stream:
    ...         assert frame.pixels.shape == (24, 32, 3)  # uint8 RGB

    Settings may change from any thread while it runs: `stream.settings.change(strength=0.4)`.

    Args:
        source: a video file, a folder of images, `webcam`, `rtsp://…`, `browser`, … as `redline stream --help` lists.
        output: a video file, a folder, `browser`, `window`, `mjpeg:8182`, … Frames are discarded by default.
        model: LSD weights, the output folder of their training, or a diffusers folder. The bundled LSD by default.
        sampler: `distilled` (default), `ddim`, `dpm_solver` or `flow_euler`.
        prompt, steps, strength, seed, control: the initial `Settings`; None uses the model's default.
        size: (height, width) to which frames are scaled first.
        live: play a file at its own pace and drop late frames, as from a camera.
        keep_going: skip damaged parts of a video file and count them as dropped.
        reset_at_cuts: clear the model's previous output when the scene changes.
        precision: `auto`, `fp32`, `tf32`, `bf16` or `fp16`.
        plan: a plan, or its one-line form such as "fp16 + channels_last"; a bundled one by default.
        duration_s: stop after this time, counted from the first frame.
        changes: a file or named pipe (`-` for stdin) with lines such as `strength=0.4 steps=2` to apply during the run.
        key, key_file: the key that viewers need; the environment variable REDLINE_KEY is used if neither is given.
        certificate: a PEM file with which the browser page is served over https.
        metrics: a file to which one JSON line per second is written.
        log: receives messages for the user; by default they go to the logger `redline.stream`.

    Raises:
        RedlineError: if an option is invalid, or the source, the model or the output cannot be opened.
    """

    def __init__(
        self,
        source: str | Path,
        output: str | Path = "null",
        *,
        model: str | Path | None = None,
        sampler: str | None = None,
        prompt: str = "",
        steps: int | None = None,
        strength: float | None = None,
        seed: int = 0,
        control: Sequence[float] = (),
        size: tuple[int, int] | None = None,
        live: bool = False,
        keep_going: bool = False,
        reset_at_cuts: bool = False,
        precision: str = "auto",
        plan: Plan | str | None = None,
        device: str = "auto",
        duration_s: float | None = None,
        changes: str | Path | None = None,
        key: str | None = None,
        key_file: Path | None = None,
        certificate: Path | None = None,
        metrics: str | Path | None = None,
        log: Callable[[str], None] = _logger.info,
    ) -> None:
        source, output = str(source), str(output)
        changes = None if changes is None else str(changes)
        self._log, self._duration_s = log, duration_s
        others = {"source": source, "output": output, "model": model, "list of changes": changes}
        self._metrics = None if metrics is None else MetricsFile(Path(metrics), others)
        key = read_key(key, key_file, serves_viewers(source, output))
        self.device = torch.device(resolve_device(device))
        plan = None if plan is None else read_plan(plan)
        plan = choose_plan("stream", Machine.detect(str(self.device)), precision, plan).plan
        self._model = load_model(None if model is None else Path(model), plan, self.device, sampler)
        frame_model = self._model.frames
        # Named control entries that were not given become 0, so that the page has a slider for each of them.
        control = (*control, *[0.0] * (len(frame_model.controls.names) - len(control)))
        steps = self._model.live_steps if steps is None else steps
        strength = self._model.strength if strength is None else strength
        self._initial = Settings(strength, steps, seed, control, prompt)
        self.settings = LiveSettings(self._initial, frame_model.check)
        self._changes = None if changes is None else SettingsReader(changes, self.settings, log)
        self.latency = Latency()
        self._engine = Engine(frame_model, self._initial, cut_threshold=CUT_THRESHOLD if reset_at_cuts else None)
        self._sample: Sample | None = None
        self._stop_requested = threading.Event()
        self._is_finished = False
        options = EndpointOptions(
            size=size,
            live=live,
            key=key,
            certificate=certificate,
            keep_going=keep_going,
            controls=frame_model.controls,
            device=self.device,
            busy_share=lambda: None if self._sample is None else self._sample.busy_share,
        )
        self._endpoints: Endpoints = open_endpoints(source, output, options, self.settings, self.latency)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses under which viewers open the output."""
        return self._endpoints.urls

    @property
    def is_live(self) -> bool:
        """Whether the source sets the pace, as a camera does, so that late frames are dropped."""
        return self._endpoints.source.is_live

    def run(self, progress: Callable[[Sample], None] = lambda sample: None) -> StreamResult:
        """Runs until the source ends, the duration is over, the window is closed, or Ctrl-C. Can be called only once.

        `progress` is called once per second. Frames that have reached the output are kept.
        """
        source, sink = self._endpoints.source, self._endpoints.sink
        self._begin()
        pipeline = Pipeline(source, self._engine, sink, settings=self.settings, latency=self.latency, log=self._log)
        if isinstance(sink, WindowSink):
            sink.on_closed = pipeline.stop

        def show(sample: Sample) -> None:
            self._sample = sample
            progress(sample)

        monitor = Monitor(
            self.latency,
            self._engine,
            self.device,
            duration_s=self._duration_s,
            stop_requested=self._stop_requested,
            stop=pipeline.stop,
            fail=pipeline.fail,
            show=show,
            write=(lambda line: None) if self._metrics is None else self._metrics.write,
        )
        # The pipeline closes the sink, so `close` must not discard the output.
        self._is_finished = True
        with ExitStack() as stack:
            stack.callback(self.close)
            stack.enter_context(set_on_signals(self._stop_requested))
            if self._changes is not None:
                stack.enter_context(self._changes)
            with monitor:
                outcome = pipeline.run()
        if monitor.error is not None:
            raise monitor.error
        self._log_nonfinite_frames()
        return StreamResult(
            info=self._info(),
            report=outcome.report,
            output=sink.path if isinstance(sink, (VideoFileSink, ImageFolderSink)) else None,
            complete=outcome.complete,
            interrupted=self._stop_requested.is_set(),
            faults=outcome.faults,
            samples=tuple(monitor.samples),
            summary=monitor.summary,
        )

    def __iter__(self) -> Iterator[Frame]:
        """Yields the frames as they are written to the output. A lost connection of the source raises SourceFault."""
        source, sink = self._endpoints.source, self._endpoints.sink
        self._begin()
        size, complete = (source.height, source.width), False
        self._engine.prepare(*size)
        try:
            with closing(source.frames()) as frames:
                for frame in frames:
                    if self._stop_requested.is_set():
                        break
                    if (frame.height, frame.width) != size:
                        size = (frame.height, frame.width)
                        self._engine.prepare(*size)
                    frame = replace(frame, settings=self.settings.now())
                    frame = replace(frame, pixels=self._engine(frame))
                    sink.write(frame)
                    yield frame
                else:
                    complete = True
        except GeneratorExit:
            pass
        except BaseException:
            self.close()
            raise
        if not self._is_finished:
            self._is_finished = True
            sink.close(complete)
        self.close()
        self._log_nonfinite_frames()

    def stop(self) -> None:
        """Requests the end of the stream; may be called from any thread. The output is finished as usual."""
        self._stop_requested.set()

    def close(self) -> None:
        """Closes source and output; an output that was not finished is discarded."""
        self._endpoints.source.close()
        if not self._is_finished:
            self._is_finished = True
            self._endpoints.sink.abandon()
        self._endpoints.close()
        if self._metrics is not None:
            self._metrics.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        if self._is_finished:
            raise RedlineError("a stream runs only once: create another one.")
        for note in self._endpoints.notes:
            self._log(note)

    def _log_nonfinite_frames(self) -> None:
        if count := self._engine.nonfinite_frames:
            self._log(f"{count:,} frames had non-finite values, which were replaced by the input: try precision fp32.")

    def _info(self) -> StreamInfo:
        source, settings = self._endpoints.source, self._initial
        steps = f"{settings.steps} step{'s' if settings.steps > 1 else ''}"
        text = f"strength {settings.strength:g}, {steps}, seed {settings.seed}"
        if settings.control:
            text += ", control " + ", ".join(f"{value:g}" for value in settings.control)
        if settings.prompt:
            text += f", prompt “{settings.prompt}”"
        return StreamInfo(
            source=source.name,
            sink=self._endpoints.sink.name,
            model=self._model.frames.name,
            device=Machine.detect(str(self.device)).name if self.device.type == "cuda" else "cpu",
            device_type=self.device.type,
            plan=str(self._model.frames.plan),
            size=f"{source.width}×{source.height}",
            settings=text,
            setup_s=self._engine.setup_s,
        )


@contextmanager
def set_on_signals(stop: threading.Event) -> Iterator[None]:
    """Sets `stop` on Ctrl-C (SIGINT) and on SIGTERM; a second such signal has its default effect.

    SIGHUP, sent when the terminal is closed, always sets `stop`, because a shell may send it twice. A SIGHUP that is
    ignored (nohup) stays ignored. Does nothing outside the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if _HANG_UP is not None and signal.getsignal(_HANG_UP) != signal.SIG_IGN:
        before[_HANG_UP] = signal.getsignal(_HANG_UP)

    def handle(number: int, _frame: object) -> None:
        stop.set()
        if number != _HANG_UP:
            signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
