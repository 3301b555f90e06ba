"""The monitor samples a stream once per second, stops it in time, and keeps bounded memory."""

import io
import json
import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.notation import format_seconds
from redline.stream.latency import STAGES, FrameTimes, Latency
from redline.stream.metrics_file import MetricsFile
from redline.stream.monitor import Monitor, Sample
from redline.stream.report_page import StreamInfo, render_stream_page
from stream.clocks import ManualClock

pytestmark = pytest.mark.timeout(HANGS_S)


class Worker:
    busy_s = 0.0


class Fed(ManualClock):
    """Five frames per tick, from the third tick on."""

    def __init__(self, latency: Latency, worker: Worker, stop: threading.Event) -> None:
        super().__init__()
        self._latency, self._worker, self._stop = latency, worker, stop
        self.sleeps_s: list[float] = []

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        if self._stop.is_set():
            return stop.wait()
        super().wait(self.sleeps_s.pop(0) if self.sleeps_s else seconds, stop)
        if len(self.waits) > 2:
            self._worker.busy_s += 0.02
            for _ in range(5):
                self._latency.record(FrameTimes(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, self.now_s()))
        return False


def test_figures_come_and_the_stream_is_stopped_in_time() -> None:
    latency, worker, stop, lines, shown = Latency(), Worker(), threading.Event(), io.StringIO(), []
    clock = Fed(latency, worker, stop)
    latency.drop("compute busy", 3)
    watch = Monitor(
        latency,
        worker,
        torch.device("cpu"),
        every_s=0.095,
        duration_s=0.48,
        stop=stop.set,
        show=shown.append,
        write=lines.write,
        clock=clock,
    )
    with watch:
        assert stop.wait(PATIENCE_S)
    # The clock starts with the first frame, in the third tick.
    assert clock.now_s() == pytest.approx(100 + 3 * 0.05 + 0.5)
    assert [sample.time_s for sample in watch.samples] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert shown == watch.samples
    *written, whole = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["frames"] for line in written] == [sample.frames for sample in watch.samples]
    assert [line["is_whole"] for line in written] == [False] * 5 and whole["is_whole"]
    assert (whole["frames"], whole["time_s"]) == (written[-1]["frames"], written[-1]["time_s"])
    # The first tick's frames are no time apart.
    assert whole["frames_per_s"] == pytest.approx((whole["frames"] - 1) / 0.5)
    assert whole["busy_share"] == pytest.approx(0.4)
    middle = watch.samples[2]
    assert middle.frames_per_s == pytest.approx(100) and middle.busy_share == pytest.approx(0.4)
    assert middle.memory_bytes > 1e6
    assert middle.p50_s == pytest.approx(0.021) and middle.drops == {"compute busy": 3}
    for stages_s in (middle.stages_p50_s, middle.stages_p95_s, middle.stages_p99_s):
        assert stages_s == pytest.approx(dict(zip(STAGES, (0.001, 0.002, 0.003, 0.004, 0.005, 0.006), strict=True)))


def test_the_last_line_is_of_all_frames() -> None:
    """The last line covers all frames, so it includes slow frames at the start."""
    latency, lines = Latency(window=10), io.StringIO()
    with Monitor(latency, Worker(), torch.device("cpu"), write=lines.write) as watch:
        for number in range(100):
            slow_s = 0.5 if number < 20 else 0.01
            latency.record(FrameTimes(0, 0, 0, slow_s, 0, 0, float(number)))
    assert watch.samples[-1].stages_p95_s["compute"] == pytest.approx(0.01)
    last = json.loads(lines.getvalue().splitlines()[-1])
    whole = latency.report_all()
    assert last["p95_s"] == whole.latency.p95_s > 0.4 and last["stages_p95_s"]["compute"] > 0.4
    assert (last["stages_p99_s"]["compute"], last["jitter_s"]) == (whole.stages["compute"].p99_s, whole.jitter_s)


def test_what_a_machine_slept_through_is_not_made_up_for() -> None:
    latency, worker, stop = Latency(), Worker(), threading.Event()
    clock = Fed(latency, worker, stop)
    clock.sleeps_s = [0.05] * 4 + [1.03] + [0.05] * 3
    with Monitor(
        latency, worker, torch.device("cpu"), every_s=0.095, duration_s=1.2, stop=stop.set, clock=clock
    ) as watch:
        assert stop.wait(PATIENCE_S)
    times = [sample.time_s for sample in watch.samples]
    assert times == pytest.approx([1.08, 1.18, 1.23])


def test_a_stream_that_is_over_before_a_tick_has_its_figures_too() -> None:
    latency, lines = Latency(), io.StringIO()

    class Unticked(ManualClock):
        def wait(self, seconds: float, stop: threading.Event) -> bool:
            return stop.wait()

    clock = Unticked()
    with Monitor(latency, Worker(), torch.device("cpu"), write=lines.write, clock=clock) as watch:
        clock.pass_s(0.02)
        for _ in range(5):
            latency.record(FrameTimes(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, clock.now_s()))
    assert [sample.frames for sample in watch.samples] == [5] and watch.samples[0].frames_per_s == pytest.approx(250)
    assert [json.loads(line)["is_whole"] for line in lines.getvalue().splitlines()] == [False, True]


@pytest.mark.parametrize("fails", [False, True])
def test_a_wanted_stop_and_a_failing_file_end_the_stream(fails: bool) -> None:
    latency, stop = Latency(), threading.Event()
    latency.record(FrameTimes(0, 0, 0, 0, 0, 0, 1.0))

    def write(line: str) -> None:
        raise RedlineError("the disk is full.")

    written = write if fails else lambda line: None
    told: list[Exception] = []
    watch = Monitor(
        latency,
        Worker(),
        torch.device("cpu"),
        every_s=0.05,
        stop=stop.set,
        fail=lambda error: (told.append(error), stop.set()),
        write=written,
    )
    with watch:
        if not fails:
            watch.stop_requested.set()
        assert stop.wait(PATIENCE_S)
    assert told == ([watch.error] if fails else [])
    assert str(watch.error) == ("the disk is full." if fails else "None")


def test_a_file_that_fails_at_the_end_is_an_error_of_the_watch() -> None:
    """It is not raised in the thread, where it would hide another error."""
    latency = Latency()

    def write(line: str) -> None:
        raise RedlineError("the disk is full.")

    with Monitor(latency, Worker(), torch.device("cpu"), every_s=0.2, write=write) as watch:
        latency.record(FrameTimes(0, 0, 0, 0, 0, 0, 1.0))
        time.sleep(0.15)
    assert str(watch.error) == "the disk is full."


def test_figures_are_there_from_the_first_line_on(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("older\n")
    file = MetricsFile(path)
    file.close()
    assert path.read_text() == "older\n"
    file = MetricsFile(path)
    file.write("one\n")
    assert path.read_text() == "one\n", "it can be followed"
    file.write("two\n")
    file.close()
    assert path.read_text() == "one\ntwo\n"


def test_figures_that_cannot_be_written_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = MetricsFile(Path("/dev/full"))
    with pytest.raises(RedlineError, match=r"^cannot write '/dev/full': No space left on device\.$"):
        full.write("one\n")
    full.close()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(RedlineError, match=r"^cannot write '.*m\.jsonl': permission denied\.$"):
        MetricsFile(tmp_path / "m.jsonl")


def test_figures_are_not_written_through_a_link(tmp_path: Path) -> None:
    own, link = tmp_path / "own.txt", tmp_path / "m.jsonl"
    own.write_text("mine")
    early = MetricsFile(link)
    link.symlink_to(own)
    refusal = r"^cannot write '.*m\.jsonl': it is a symbolic link, .*; give the file itself\.$"
    with pytest.raises(RedlineError, match=refusal):
        early.write("one\n")  # the link was made meanwhile
    with pytest.raises(RedlineError, match=refusal):
        MetricsFile(link)
    link.unlink()
    link.symlink_to(tmp_path / "none")
    with pytest.raises(RedlineError, match=refusal):
        MetricsFile(link)
    assert own.read_text() == "mine" and not (tmp_path / "none").exists()


def test_figures_go_through_a_link_to_a_pipe() -> None:
    """/dev/stdout and a shell's >(...) are such links."""
    read, write = os.pipe()
    file = MetricsFile(Path(f"/dev/fd/{write}"))
    file.write("one\n")
    file.close()
    assert os.read(read, 10) == b"one\n"
    for end in (read, write):
        os.close(end)


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for kept in ("", "one\n"):
        file = MetricsFile(tmp_path / "m.jsonl")
        if kept:
            file.write(kept)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept), before[1]))
        try:
            with pytest.raises(RedlineError, match=r"^cannot write '.*m\.jsonl': File too large\.$"):
                file.write("more\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            file.close()
        assert [path.read_text() for path in tmp_path.iterdir()] == ([kept] if kept else [])


def test_samples_are_thinned_and_reach_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.monitor._MAX_SAMPLES", 16)
    watch = Monitor(Latency(), Worker(), torch.device("cpu"))
    for second in range(1000):
        watch._keep(sample(second))
    times = [one.time_s for one in watch.samples]
    assert len(times) < 16 and times[-1] > 850 and times == sorted(times)
    gaps = {after - before for before, after in zip(times, times[1:], strict=False)}
    assert len(gaps) == 1, "evenly"


def sample(second: int) -> Sample:
    stages = {stage: 0.001 * (number + 1) for number, stage in enumerate(STAGES)}
    drops = {"compute <busy>": second}
    times = (0.02, 0.03, 0.04, 0.001, stages, stages, stages)
    return Sample(float(second), 25 * second, 25.0, *times, drops, 0.5, 2**28 + second, 2**29)


def test_the_page_holds_every_curve_and_escapes_what_others_wrote() -> None:
    latency = Latency()
    for number in range(50):
        latency.record(FrameTimes(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, number / 25))
    latency.drop("compute <busy>", 7)
    about = StreamInfo("<b>film</b>", "null", "LSD tiny", "cpu", "cpu", "channels_last", "64×48", "strength 1", 1.5)
    whole = replace(sample(3000), busy_share=0.31, peak_bytes=3 * 2**30, is_whole=True)
    page = render_stream_page(about, latency.report(), [sample(second) for second in range(2000)], whole)
    # What is said of all frames is not what the samples that were kept say.
    assert "31%" in page and "3 GiB" in page and f"50 frames in {format_seconds(3000)}" in page
    assert "<b>film" not in page and "&lt;b&gt;film" in page and "compute <busy>" not in page
    for name in ("latency", "stages", "rate", "drops", "memory", "share"):
        assert f'id="{name}-640-title"' in page, name
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert len(page) < 600_000, "long streams make no long pages"
    assert render_stream_page(about, Latency().report(), [], whole)


def test_the_page_names_the_kind_of_device() -> None:
    for name, kind, said in (("NVIDIA H200", "cuda", "the GPU computed"), ("cpu", "cpu", "the CPU computed")):
        about = StreamInfo("film", "null", "LSD tiny", name, kind, "channels_last", "64×48", "strength 1", 1.5)
        page = render_stream_page(about, Latency().report(), [sample(second) for second in range(3)], sample(3))
        assert said in page and name in page
