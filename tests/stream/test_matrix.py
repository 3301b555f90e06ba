"""The benchmark of sizes × plans: one row per arm, compared with fp32, and a wrong arm is detected."""

import gc
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.ladder import plans
from redline.ladder.plan import Plan
from redline.machine.memory import free_cuda_caches
from redline.models.lsd import Lsd, LsdConfig, load_lsd
from redline.stream import matrix
from redline.stream.loading import SHIPPED
from redline.stream.lsd_frames import LsdProgram
from redline.stream.matrix import ARMS, CPU_ARMS, PLAIN, WARM_UP_FRAMES, Arm, DevicePeaks, Row, Shape, is_lost, measure
from upscale.video.clips import make_clip

CPU = torch.device("cpu")
SHAPE = Shape("tiny", side=17, frames=61)
LAST = Arm("channels_last", "channels_last")


@pytest.fixture
def model() -> Lsd:
    torch.manual_seed(0)
    model = Lsd(LsdConfig(2, 8, (1, 2), control=0))
    with torch.no_grad():
        model.head.weight.mul_(0.1)
    return model


def rows(model: Lsd, *arms: Arm) -> dict[str, Row]:
    return {row.arm.name: row for row in measure(SHAPE, arms, CPU, model)}


def test_every_arm_is_a_row(model: Lsd) -> None:
    found = rows(model, PLAIN, LAST, Arm("graph", "cuda_graph"))
    assert list(found) == ["fp32", "channels_last", "graph"]
    assert found["graph"].failure.startswith("cuda_graph: ") and not found["graph"].frames_per_s
    for name in ("fp32", "channels_last"):
        row = found[name]
        assert row.frames_per_s > 0 and row.model_ms > 0 and row.p99_ms >= row.p50_ms > 0 and not row.failure
        assert row.frame_ms == pytest.approx(1e3 / row.frames_per_s)
        assert row.plan == ("eager" if name == "fp32" else name)
    assert found["fp32"].least_psnr_db is None
    assert (found["channels_last"].least_psnr_db or 0) > 50
    json.dumps(asdict(found["fp32"]), allow_nan=False)


def test_a_plain_loop_makes_the_same_frames_one_after_the_other(model: Lsd) -> None:
    found = rows(model, PLAIN, Arm("loop", "eager", overlapped=False))["loop"]
    assert found.least_psnr_db == 200 and not found.failure
    assert found.frames_per_s > 0 and found.p99_ms >= found.p50_ms > found.model_ms / 2
    # Nothing lies beside a frame: it is as old as it took.
    assert found.p50_ms < 1.5 * found.frame_ms


def test_an_arm_that_is_off_is_seen(model: Lsd, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that drifts by one level every few frames."""
    right, calls = LsdProgram.run, 0

    def run(self: LsdProgram, frame: Tensor, previous: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        wrong = 0.002 * calls if self._frames.plan.rungs else 0.0
        return right(self, frame, previous) + wrong

    monkeypatch.setattr(LsdProgram, "run", run)
    found = rows(model, PLAIN, LAST)["channels_last"]
    assert (found.least_psnr_db or 100) < 30 and (found.mean_psnr_db or 0) > (found.least_psnr_db or 0)


def test_the_first_frames_do_not_count(model: Lsd, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = LsdProgram.run, 0

    def run(self: LsdProgram, frame: Tensor, previous: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # Each of the two streams begins with a frame that warms up.
        if SHAPE.frames + 2 < calls <= SHAPE.frames + 2 + WARM_UP_FRAMES:
            time.sleep(0.02)
        return right(self, frame, previous)

    monkeypatch.setattr(LsdProgram, "run", run)
    found = rows(model, PLAIN)["fp32"]
    assert calls == 2 * (SHAPE.frames + 1) and found.model_ms < 1.5 * found.frame_ms


def test_without_the_plain_arm_there_is_its_row_alone(model: Lsd, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: LsdProgram, frame: Tensor, previous: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(LsdProgram, "run", run)
    for arms in ((LAST,), (LAST, PLAIN)):
        found = rows(model, *arms)
        assert list(found) == ["fp32"] and found["fp32"].failure == "no kernel image" and not found["fp32"].device_lost


def test_a_lost_device_is_reported_in_the_last_row(model: Lsd, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LsdProgram.run

    def run(self: LsdProgram, frame: Tensor, previous: Tensor) -> Tensor:
        if self._frames.plan.rungs:
            raise RuntimeError("CUDA error: an illegal memory access was encountered.")
        return right(self, frame, previous)

    monkeypatch.setattr(LsdProgram, "run", run)
    assert list(rows(model, LAST, Arm("again", "eager"))) == ["channels_last", "again"]
    monkeypatch.setattr(matrix, "is_lost", lambda device: True)
    found = rows(model, LAST, Arm("again", "eager"))
    assert list(found) == ["channels_last"] and found["channels_last"].device_lost
    assert found["channels_last"].failure.endswith(
        "access was encountered; the device is lost, start again for the remaining arms"
    )


def test_the_plain_arm_runs_unasked_for(model: Lsd) -> None:
    found = rows(model, LAST)
    assert list(found) == ["channels_last"] and found["channels_last"].least_psnr_db is not None


def test_a_video_is_read_in_place_of_a_clip(model: Lsd, tmp_path: Path) -> None:
    make_clip(tmp_path / "video.mkv", frames=64, size=(48, 32))
    shape = Shape("tiny", side=16, frames=61, video=str(tmp_path / "video.mkv"))
    found = {row.arm.name: row for row in measure(shape, (PLAIN, LAST), CPU, model)}
    assert not found["fp32"].failure and (found["channels_last"].least_psnr_db or 0) > 50
    assert found["fp32"].grown_bytes is None, "a CPU's allocators tell nothing of the kind"
    assert [frame.index for frame in matrix._source(shape).frames()] == list(range(61)), "and no more of it"
    (short,) = measure(Shape(side=16, frames=65, video=shape.video), (PLAIN, LAST), CPU, model)
    assert short.failure == f"{shape.video!r} has only 64 frames, not 65"


def test_the_shipped_weights_run_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Lsd] = []
    monkeypatch.setattr(matrix, "_run", lambda row, plan, model, *_: seen.append(model) or (row, []))
    for kind in ("fresh", "shipped"):
        list(measure(Shape(weights=kind), (PLAIN,), CPU))
    shipped = load_lsd(SHIPPED).state_dict()
    same = [all(torch.equal(value, shipped[name]) for name, value in one.state_dict().items()) for one in seen]
    assert same == [False, True]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": "huge"}, "supported: tiny, light, medium, heavy"),
        ({"batch": 4}, "unknown key 'batch' of the live model"),
        ({"frames": 3}, r"frames = 3 .*must be a whole number \(at least 61\)"),
        ({"steps": 0}, "steps = 0 of the live model must be a whole number"),
        ({"side": "abc"}, "^side = 'abc' of the live model must be a whole number"),
        ({"frames": 61.5}, r"^frames = 61\.5 of the live model must be a whole number"),
        ({"steps": 5}, r"^steps = 5 .* \(at least 1 and at most 4\)\.$"),
        ({"video": "none.mp4"}, r"^video: there is no file 'none\.mp4'\.$"),
        ({"weights": "mine"}, "weights = 'mine' of the live model must be one of fresh, shipped"),
        ({"weights": "shipped", "size": "light"}, "weights = shipped is not available for size light"),
        ({"steps": True}, "^steps = True of the live model must be a whole number"),
    ],
)
def test_wrong_shapes_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        Shape.of(options)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 2])
def test_every_arm_runs_on_a_gpu_compiled_too_and_stays_close(steps: int) -> None:
    gpu = torch.device("cuda")
    found = list(measure(Shape("tiny", side=64, steps=steps, frames=200), ARMS, gpu))
    assert [row.failure for row in found] == [""] * len(ARMS)
    psnrs_db = {row.arm.name: row.least_psnr_db or 0 for row in found[1:]}
    assert {name: psnr_db for name, psnr_db in psnrs_db.items() if psnr_db <= 35} == {}
    peaks = {row.arm.name: (row.peak_bytes, row.setup_peak_bytes) for row in found}
    # The weights alone take two bytes a parameter in half precision.
    assert {name: peak for name, peak in peaks.items() if min(peak) < 2 * found[0].parameters} == {}, peaks
    assert [row.grown_bytes for row in found if row.arm.graph] == [0, 0, 0]


@pytest.mark.gpu
def test_memory_is_that_of_the_running_stream() -> None:
    """The set-up peak includes fp32 and fp16 weights, the running peak only fp16, whatever ran before."""
    gpu, half = torch.device("cuda"), Arm("fp16", "fp16")
    plain, row = measure(Shape("light", frames=61), (PLAIN, half), gpu)
    assert not row.failure and row.peak_bytes < 4 * row.parameters
    assert 5.5 * row.parameters < row.setup_peak_bytes < 7.5 * row.parameters
    assert plain.peak_bytes > 4 * plain.parameters


def test_psnr_tells_equal_bytes_from_nearly_equal_ones() -> None:
    assert matrix._psnr_db(0.0) == 200 and matrix._psnr_db(1.0) == pytest.approx(48.13, abs=0.01)
    assert matrix._psnr_db(1e-4) == pytest.approx(88.13, abs=0.01)  # one byte of 10,000, by one


def test_the_shipped_plan_is_an_arm() -> None:
    """The benchmark must measure the plan that is shipped."""
    shipped = Plan.load(Path(plans.__file__).parent / "stream-cuda.toml")
    assert [arm.graph for arm in ARMS if Plan.parse(arm.plan) == shipped] == [True]
    shipped = Plan.load(Path(plans.__file__).parent / "stream-cpu.toml")
    assert Plan.parse(CPU_ARMS[-1].plan) == shipped


def test_peaks_are_since_the_last_and_beyond_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, seen = iter([700, 300]), []
    monkeypatch.setattr(torch.compiler, "reset", lambda: seen.append("code"))
    monkeypatch.setattr(gc, "collect", lambda: seen.append("cycles"))
    # A build of torch without CUDA does not have it.
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: seen.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("cache"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: seen.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    memory = DevicePeaks(torch.device("cuda"))
    assert seen == ["code", "cycles", "workspaces", "cache", "reset"]
    assert (memory.take(), memory.take()) == (600, 200)
    assert seen[5:] == ["reset", "reset"]


def test_a_cpu_has_none_and_is_never_lost() -> None:
    assert DevicePeaks(torch.device("cpu")).take() == 0 and not is_lost(torch.device("cpu"))


def test_what_fails_for_good_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert is_lost(torch.device("cuda"))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    gpu = torch.device("cuda")
    kept = torch.zeros(1 << 20, dtype=torch.uint8, device=gpu)
    memory = DevicePeaks(gpu)
    torch.zeros(1 << 24, dtype=torch.uint8, device=gpu)
    assert memory.take() == 1 << 24 and memory.take() == 0
    assert not is_lost(gpu) and kept.numel()


@pytest.mark.gpu
def test_workspaces_of_earlier_runs_do_not_lower_the_peak() -> None:
    """cuBLAS keeps a workspace after its first product, and a CUDA graph capture frees it."""
    gpu = torch.device("cuda")
    square = torch.ones(64, 64, device=gpu)
    free_cuda_caches()
    before_bytes = torch.cuda.memory_allocated(gpu)
    torch.mm(square, square)
    assert torch.cuda.memory_allocated(gpu) > before_bytes
    memory = DevicePeaks(gpu)
    torch.zeros(1 << 20, dtype=torch.uint8, device=gpu)
    torch._C._cuda_clearCublasWorkspaces()
    assert memory.take() == 1 << 20 and memory.take() == 0
