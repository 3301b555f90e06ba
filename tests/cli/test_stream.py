"""`redline stream` as it is typed: what it prints and leaves, its exit codes, and one sentence for what cannot be."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from forked_python import COMMAND_LINE, ForkedPython
from patience import HANGS_S
from redline.cli.stream import _show
from redline.errors import RedlineError
from redline.models.lsd import Lsd, LsdConfig, save_lsd
from redline.stream import memory_check
from redline.stream.latency import STAGES, Latency
from redline.stream.monitor import Sample
from redline.stream.report_page import StreamResult
from redline.stream.sinks.video_file import VideoFileSink
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.stream import Stream
from upscale.video.clips import make_clip

from .conftest import Seen

pytestmark = pytest.mark.timeout(HANGS_S)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_lsd(Lsd(LsdConfig(width=16, multipliers=(1, 2))), path, about={"sample_steps": "2"})
    return path


@pytest.fixture
def stream(command: Callable[..., Seen], weights: Path) -> Callable[..., Seen]:
    """Without the compiler of the bundled plan, which takes its time."""
    return lambda *arguments: command("stream", *arguments, "-m", weights, "--device", "cpu", "--plan", "channels_last")


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def sentence(seen: Seen) -> str:
    """The one sentence of a refusal, and nothing besides."""
    text = " ".join(seen.err.split())
    assert seen.code == 2 and seen.out == "" and text.startswith("redline: ") and text.endswith("."), seen
    assert "Traceback" not in text
    return text.removeprefix("redline: ")


def test_a_test_clip_to_nothing(stream: Callable[..., Seen], tmp_path: Path) -> None:
    seen = stream("synthetic:40x24,0.4", "null", "--metrics", "m.jsonl", "--report", "r.html", "--json")
    found = seen.json()
    assert seen.code == 0 and found["report"]["frames"] == 10 and found["whole"] and not found["report"]["drops"]
    assert (found["size"], found["model"], found["plan"]) == ("40×24", "LSD of width 16", "channels_last")
    assert found["settings"] == "strength 1, 1 step, seed 0, control 0, 0"
    stages = found["report"]["stages"]
    assert all(stages[name]["p50_s"] > 0 for name in ("capture", "wait", "copy_in", "compute", "copy_out", "display"))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines and lines[-1]["frames"] == 10 and lines[-1]["memory_bytes"] > 1e6
    # The table at the end, --json and the last line are of the same frames: all of them.
    assert lines[-1]["is_whole"] and lines[-1]["p99_s"] == found["report"]["latency"]["p99_s"]
    for name in ("p50_s", "p95_s", "p99_s"):
        assert lines[-1][f"stages_{name}"] == {stage: spread[name] for stage, spread in stages.items()}
    assert "10 frames" in (tmp_path / "r.html").read_text()


def test_the_line_in_the_terminal_says_stages_and_jitter() -> None:
    stages = dict(zip(STAGES, (0.001, 0.002, 0.0003, 0.0125, 0.0004, 0.003), strict=True))
    said: list[str] = []
    status = SimpleNamespace(update=said.append)
    _show(status, Sample(1.0, 25, 25.0, 0.02, 0.03, 0.04, 0.0015, stages, stages, stages, {}, 0.5, 2**28, 2**29), "CPU")
    assert said == [
        "25.0 frames/s, p50/p95/p99 20/30/40 ms, jitter 1.5 ms, dropped 0, CPU 50%, 256 MiB\n"
        "  capture 1, wait 2, copy in 0.3, compute 12, copy out 0.4, display 3 ms"
    ]


def test_the_table(stream: Callable[..., Seen]) -> None:
    seen = stream("synthetic:16x16,0.2", "null")
    assert seen.code == 0 and "latency" in seen.out and "5 frames" in seen.out and "none dropped" in seen.out


def test_a_video_keeps_its_times_and_audio(stream: Callable[..., Seen], tmp_path: Path) -> None:
    make_clip(tmp_path / "in.mp4", frames=6, size=(48, 32), sound="aac")
    assert (
        stream("in.mp4", "out.mkv", "--steps", "1", "--strength", "0.5", "--seed", "3", "--control", "0.5,1").code == 0
    )
    frames = list(VideoFile(tmp_path / "out.mkv").frames())
    assert [frame.time_s for frame in frames] == [Fraction(index, 25) for index in range(6)]
    assert VideoFile(tmp_path / "out.mkv").has_audio and frames[0].pixels.shape == (32, 48, 3)


def test_another_size_and_a_folder(stream: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "in" / f"{number}.png")
    assert stream("in", "out/", "--size", "24x18").code == 0
    assert [size(path) for path in sorted((tmp_path / "out").iterdir())] == [(24, 18)] * 3


def test_a_duration_ends_a_live_stream(stream: Callable[..., Seen]) -> None:
    seen = stream("synthetic:16x16@30", "null", "--live", "--duration", "500ms", "--json", "--reset-at-cuts")
    found = seen.json()
    assert seen.code == 0 and not found["whole"] and not found["interrupted"] and 0.2 < found["seconds"] < 5


def test_a_frame_of_one_pixel(stream: Callable[..., Seen], tmp_path: Path) -> None:
    assert stream("synthetic:1x1,0.2", "out/").code == 0
    assert size(tmp_path / "out" / "frame_00000004.png") == (1, 1)


def test_variable_frame_rate(stream: Callable[..., Seen], tmp_path: Path) -> None:
    ticks = [0, 512, 513, 4000, 4100, 9999]
    make_clip(tmp_path / "v.mp4", pts=ticks, frames=6)
    assert stream("v.mp4", "out.mp4").code == 0
    assert [frame.time_s for frame in VideoFile(tmp_path / "out.mp4").frames()] == [Fraction(t, 12800) for t in ticks]


def test_a_size_that_changes_during_a_stream_is_reported_and_leaves_no_half_video(
    stream: Callable[..., Seen], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number, side in enumerate((16, 16, 24)):
        Image.new("RGB", (side, side)).save(tmp_path / "in" / f"{number}.png")
    seen = stream("in", "out.mp4")
    said = "the frame size changes to 24×24, which 'out.mp4' does not support: give --size 16x16."
    assert seen.code == 2 and said in " ".join(seen.err.split()) and seen.err.count("changes") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert stream("in", "out/").code == 0
    assert size(tmp_path / "out" / "frame_00000002.png") == (24, 24)


def test_damage_is_reported_with_what_would_leave_it_out(stream: Callable[..., Seen], tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=30, options={"preset": "ultrafast", "g": "1", "crf": "5"})
    data = bytearray((tmp_path / "a.mkv").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 900] = bytes(900)
    (tmp_path / "a.mkv").write_bytes(data)
    said = sentence(stream(tmp_path / "a.mkv", tmp_path / "out.mp4"))
    assert "'a.mkv'" in said and said.endswith("Use --keep-going to skip the damage.")
    assert not (tmp_path / "out.mp4").exists()
    assert stream(tmp_path / "a.mkv", tmp_path / "out.mp4", "--keep-going").code == 0


def test_a_truncated_video_is_an_error_unless_it_is_to_go_on(stream: Callable[..., Seen], tmp_path: Path) -> None:
    make_clip(tmp_path / "a.mkv", frames=12)
    data = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(data[: len(data) * 4 // 5])
    assert sentence(stream("a.mkv", "out.mp4")).endswith("at its end. Use --keep-going to skip the damage.")
    assert not (tmp_path / "out.mp4").exists()
    seen = stream("a.mkv", "out.mp4", "--keep-going")
    assert seen.code == 0 and "dropped (missing)" in seen.out


def test_invalid_endpoints(stream: Callable[..., Seen], tmp_path: Path) -> None:
    assert sentence(stream("/dev/video99", "null")).startswith("there is no camera '/dev/video99'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/live"
        assert sentence(stream(address, "null")) == f"{address!r} cannot be opened: Connection refused."
    make_clip(tmp_path / "whole.mp4", frames=3)
    data = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "codec.mp4").write_bytes(data.replace(b"avc1", b"zzz9").replace(b"avcC", b"free"))
    assert "there is no decoder for the video codec of" in sentence(stream("codec.mp4", "null"))
    assert "unknown source 'wbecam'; use one of: a video file" in sentence(stream("wbecam", "null"))
    assert "unknown output 'nul'; use one of: a video file" in sentence(stream("synthetic", "nul"))
    assert "can be reached from other machines: give a --key" in sentence(stream("synthetic", "mjpeg:0.0.0.0:0"))
    assert "it is the source" in sentence(stream("whole.mp4", "whole.mp4"))
    assert (tmp_path / "whole.mp4").read_bytes() == data


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "512"], "invalid --size '512': write width and height, as in 512x512."),
        (["--size", "0x5"], "invalid --size '0x5': write width and height, as in 512x512."),
        (["--control", "a,b"], "invalid --control 'a,b': write numbers separated by commas."),
        (["--control", ",".join("1" * 9)], "LSD of width 16 supports at most 8 control numbers, not 9."),
        (["--control", "0,5"], "control “Keep colour cast” must be from 0 to 1, not 5."),
        (["--control", "-1"], "control “Keep darkness” must be from 0 to 1, not -1."),
        (["--steps", "9"], "1 to 4 steps, not 9."),
        (["--steps", "0"], "steps must be a whole number from 1 to 1000, not 0."),
        (["--strength", "2"], "strength must be a number from 0 to 1, not 2.0."),
        (["--sampler", "magic"], "unknown sampler 'magic' (supported: ddim,"),
        (["--precision", "fp32"], "the plan sets the precision: leave out --precision, or --plan."),
        (["--prompt", "a cat"], "an LSD does not support --prompt"),
        (["--duration", "long"], "'long' is not a duration"),
        (["--metrics", "no/m.jsonl"], "cannot write 'no/m.jsonl': its folder does not exist."),
        (["--report", "."], "cannot write '.': it is a folder."),
    ],
)
def test_options_that_are_invalid(stream: Callable[..., Seen], tmp_path: Path, options: list[str], said: str) -> None:
    assert said in sentence(stream("synthetic:8x8,1", "out.mp4", *options))
    assert list(tmp_path.iterdir()) == []


def test_metrics_and_report_must_be_different_files(stream: Callable[..., Seen]) -> None:
    said = sentence(stream("synthetic:8x8,1", "null", "--metrics", "x", "--report", "x"))
    assert said == "cannot write 'x': it is the metrics file."


def test_the_report_overwrites_no_input(stream: Callable[..., Seen], tmp_path: Path) -> None:
    make_clip(tmp_path / "in.mp4", frames=3)
    assert sentence(stream("in.mp4", "null", "--report", "in.mp4")) == "cannot write 'in.mp4': it is the source."


def test_without_arguments_it_says_what_to_type(command: Callable[..., Seen]) -> None:
    seen = command("stream")
    assert seen.code == 2 and seen.out == "" and "Traceback" not in seen.err
    assert seen.err.startswith("redline: give a source (IN) and an output (OUT), as in")
    assert "\n  redline stream webcam browser " in seen.err and "redline stream --help" in seen.err
    half = command("stream", "video.mp4")
    assert half.code == 2 and half.err.startswith("redline: give an output (OUT) for 'video.mp4', as in")


def test_a_key_need_not_be_in_the_list_of_processes(
    stream: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("from a file, long enough\n")
    served = stream("synthetic:16x16,0.1", "mjpeg:0", "--key-file", "key")
    assert served.code == 0 and served.err.count("?key=from%20a%20file%2C%20long%20enough") >= 2
    monkeypatch.setenv("REDLINE_KEY", "of the environment")
    served = stream("synthetic:16x16,0.1", "mjpeg:0")
    assert served.code == 0 and "/stream.mjpeg?key=of%20the%20environment" in served.err
    assert stream("synthetic:16x16,0.1", "null").code == 0, "it is for other streams"
    assert "needs an output that serves viewers" in sentence(stream("synthetic:16x16,0.1", "null", "--key-file", "key"))


def test_models_that_are_invalid(command: Callable[..., Seen], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for model, said in [
        ("none.safetensors", "cannot read the safetensors file 'none.safetensors'"),
        ("empty", "'empty' is not a model folder: it has no model_index.json and no model.safetensors."),
        ("junk.safetensors", "is not a readable safetensors file"),
    ]:
        assert said in sentence(command("stream", "synthetic:8x8,1", "null", "-m", model, "--device", "cpu"))
    assert "unknown precision 'fp4'" in sentence(command("stream", "synthetic", "null", "--precision", "fp4"))


def test_without_a_model_the_shipped_one_runs(command: Callable[..., Seen]) -> None:
    found = command("stream", "synthetic:64x48,0.2", "null", "--device", "cpu", "--plan", "eager", "--json").json()
    assert found["model"] == "LSD tiny" and found["report"]["frames"] == 5 and found["whole"]


def test_the_folder_of_a_training(command: Callable[..., Seen], weights: Path, tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "model.safetensors").write_bytes(weights.read_bytes())
    plan = ("--device", "cpu", "--plan", "eager")
    seen = command("stream", "synthetic:8x8,0.2", "null", "-m", "trained", *plan, "--json")
    assert seen.code == 0 and seen.json()["plan"] == "eager"


def test_too_little_memory_is_reported_before_anything_starts(
    stream: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 6 * 2**20)
    said = sentence(stream("synthetic:480x320,1", "out.mp4"))
    assert "needs about" in said and "for frames of 480×320" in said and said.endswith("would fit.")
    assert list(tmp_path.iterdir()) == []
    fits = said.split("--size ")[1].split()[0]
    assert stream("synthetic:480x320,0.04", "null", "--size", fits).code == 0


def test_a_stream_that_cannot_start_leaves_what_was_there(
    stream: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "old.jsonl").write_text("older")
    monkeypatch.setattr("redline.stream.sources.synthetic._pattern", None)
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 6 * 2**20)
    for metrics in ("old.jsonl", "new.jsonl"):
        assert "needs about" in sentence(stream("synthetic:16000x16000", "null", "--metrics", metrics))
    assert "a side has at most 16384 pixels" in sentence(stream("synthetic:20000x20000", "null"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_weights_that_do_not_fit_are_reported_before_they_are_read(
    stream: Callable[..., Seen], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr(memory_check, "free_bytes", lambda device: weights.stat().st_size - 1)
        small.setattr("redline.stream.loading.load_lsd", None)
        said = sentence(stream("synthetic:8x8,1", "null"))
    assert said.startswith(f"the weights of '{weights}' take ") and said.endswith(
        "a model of 99% of this size would fit."
    )

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("redline.stream.loading.LsdFrames", full)
    said = sentence(stream("synthetic:8x8,1", "null"))
    assert said.endswith("is out of memory on cpu with the plan channels_last: use a smaller model or another plan.")


def test_figures_that_cannot_be_written_are_reported_and_leave_no_half_video(
    stream: Callable[..., Seen], tmp_path: Path
) -> None:
    seen = stream("synthetic:16x16", "out.mp4", "--duration", "60s", "--metrics", "/dev/full")
    text = " ".join(seen.err.split())
    assert seen.code == 2 and text.endswith("redline: cannot write '/dev/full': No space left on device.")
    assert "Traceback" not in text and list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_costs_no_table(
    stream: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise RedlineError(f"cannot write {str(path)!r}: No space left on device.")

    monkeypatch.setattr("redline.stream.report_page.write_text", full)
    seen = stream("synthetic:16x16,0.2", "null", "--report", "r.html")
    assert seen.code == 2 and "5 frames" in seen.out and "latency" in seen.out
    assert " ".join(seen.err.split()).endswith("redline: cannot write 'r.html': No space left on device.")


def test_ctrl_c_keeps_what_was_recorded(weights: Path, tmp_path: Path, forked_python: ForkedPython) -> None:
    words = ["stream", "synthetic:16x16@20", "out.mp4", "--live", "-m", weights, "--plan", "eager", "--device", "cpu"]
    out, err, metrics = (tmp_path / name for name in ("out", "err", "m.jsonl"))
    with out.open("wb") as stdout, err.open("wb") as stderr:
        outputs = {"stdout": stdout, "stderr": stderr}
        process = forked_python.start(COMMAND_LINE, *words, "--metrics", metrics, cwd=tmp_path, **outputs)
        try:
            for _ in range(600):
                if metrics.exists() and metrics.read_text():
                    break
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGINT)
            code = process.wait()
        finally:
            process.kill()
    assert code == 0, err.read_text()
    assert b"frames" in out.read_bytes() and b"Traceback" not in err.read_bytes()
    assert len(list(VideoFile(tmp_path / "out.mp4").frames())) > 3


def test_a_video_made_by_us_goes_in_again(stream: Callable[..., Seen], tmp_path: Path) -> None:
    sink = VideoFileSink(tmp_path / "a.mp4", Fraction(25))
    for frame in SyntheticClip(17, 23, count=4).frames():
        sink.write(frame)
    sink.close()
    assert stream("a.mp4", "b.mp4", "--live").code == 0
    assert (tmp_path / "b.mp4").exists()


def test_without_frames_no_report_is_written(
    tmp_path: Path, stream: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before a first frame came."""

    def stopped(self: Stream, progress: object = None) -> StreamResult:
        self.close()
        return StreamResult(self._info(), Latency().report(), None, False, True, 0, (), None)

    monkeypatch.setattr(Stream, "run", stopped)
    seen = stream("synthetic:16x16,0.2", "null", "--report", "r.html")
    assert seen.code == 130 and "no frame was processed, so there is no report" in seen.err
    assert list(tmp_path.iterdir()) == []
