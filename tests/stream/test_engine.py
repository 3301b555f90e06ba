"""The engine computes what the training evaluates, at any size, and captures each graph once."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.models.lsd import load_lsd
from redline.stream import memory_check
from redline.stream.engine import CUT_THRESHOLD, Engine
from redline.stream.frames import Frame
from redline.stream.loading import SHIPPED
from redline.stream.lsd_frames import LsdFrames
from redline.stream.settings import Settings
from redline.stream.sources.synthetic import SyntheticClip
from redline.training.lsd.validation import restorer
from stream.small_models import SMALL, clip, small_lsd

FULL = Settings(strength=1.0, steps=2)


class Counting:
    """Replaces the recorder of CUDA graphs: a replay is another call."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.rehearsals = self.captures = 0

    def supports(self, tensors: list[Tensor]) -> bool:
        return True

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.rehearsals += 1
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        return None, run

    def pool_bytes(self) -> int:
        return 0


def engine(sampler: str = "distilled", plan: str = "", settings: Settings = FULL, **options: Any) -> Engine:
    return Engine(LsdFrames(small_lsd(), Plan.parse(plan), "cpu", sampler), settings, **options)


def play(engine: Engine, frames: list[Frame], settings: Settings = FULL) -> list[Tensor]:
    engine.prepare(frames[0].height, frames[0].width)
    return [engine(replace(frame, settings=settings)) for frame in frames]


def as_picture(pixels: Tensor) -> Tensor:
    return pixels.permute(2, 0, 1)[None].float() / 255


def agree(made: Tensor, expected_01: Tensor) -> None:
    """Bytes may differ by one where rounding is ambiguous."""
    error = (made.permute(2, 0, 1).float() - expected_01[0] * 255).abs()
    assert error.max() < 0.502, error.max()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_clip_is_what_training_judges(steps: int) -> None:
    frames, settings = clip(5, 24, 24), Settings(1.0, steps, seed=0)
    restore = restorer(small_lsd(), steps, 1, 24, torch.device("cpu"))
    previous, last = as_picture(frames[0].pixels), None
    for frame, made in zip(frames, play(engine(settings=settings), frames, settings), strict=True):
        with torch.inference_mode():
            previous = restore(as_picture(frame.pixels), previous)
        agree(made, previous)
        assert last is None or not torch.equal(made, last), "the clip moves"
        last = made


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 40), (7, 9), (13, 24), (33, 17)])
def test_any_size_is_mirrored_and_cut(height: int, width: int) -> None:
    frames = clip(3, height, width)
    made = play(engine(), frames)
    padded = [max(-(-side // SMALL.multiple_px), 2) * SMALL.multiple_px for side in (height, width)]

    def mirrored(length: int, side: int) -> list[int]:
        there_and_back = [*range(side), *range(side - 2, 0, -1)]
        return [there_and_back[place % len(there_and_back)] for place in range(length)]

    rows, columns = mirrored(padded[0], height), mirrored(padded[1], width)
    wide = [replace(frame, pixels=frame.pixels[rows][:, columns]) for frame in frames]
    for small, large in zip(made, play(engine(), wide), strict=True):
        assert small.shape == (height, width, 3)
        assert torch.equal(small, large[:height, :width])


@pytest.mark.parametrize("sampler", ["distilled", "ddim", "dpm_solver", "flow_euler"])
def test_every_setting_changes_the_frame_and_is_taken_back(sampler: str) -> None:
    made = engine(sampler, recorder=Counting)
    frame = clip(1, 16, 16)[0]
    made.prepare(16, 16)

    def shown(**changes: Any) -> Tensor:
        made.reset()
        return made(replace(frame, settings=replace(FULL, **changes)))

    plain = shown()
    for changes in ({"strength": 0.4}, {"seed": 9}, {"control": (1.0, 0.5)}, {"steps": 3}):
        assert not torch.equal(shown(**changes), plain), changes
        assert torch.equal(shown(), plain), changes
    assert made.captures == (4 if sampler == "distilled" else 2), "one for each number of steps"


def test_a_changed_setting_is_what_a_new_engine_makes_of_it() -> None:
    frame, other = clip(1, 17, 16)[0], Settings(0.7, 1, 5, (0.25,))
    changed = engine(recorder=Counting)
    changed.prepare(17, 16)
    changed(frame)
    changed.reset()
    fresh = engine(settings=other)
    fresh.prepare(17, 16)
    frame = replace(frame, settings=other)
    assert torch.equal(changed(frame), fresh(frame))


def test_warm_ups_leave_no_history_and_every_number_of_steps_is_recorded_once() -> None:
    frames = clip(6, 16, 24)
    plan = [FULL, replace(FULL, steps=1), replace(FULL, steps=3), FULL, replace(FULL, steps=1), FULL]
    recorded, plain = engine("ddim", recorder=Counting), engine("ddim")
    for one in (recorded, plain):
        one.prepare(16, 24)
    for frame, settings in zip(frames, plan, strict=True):
        frame = replace(frame, settings=settings)
        assert torch.equal(recorded(frame), plain(frame))
    assert recorded.captures == 3


def test_few_steps_are_all_recorded_before_the_first_frame_at_every_size() -> None:
    """A slider must never delay a frame."""
    made, frame = engine(recorder=Counting), clip(1, 16, 24)[0]
    made.prepare(16, 24)
    assert made.captures == 4 and list(made._prepared) == [1, 3, 4, 2] and made._settings == FULL
    shown = [made(replace(frame, settings=replace(FULL, steps=steps, strength=0.7))) for steps in (1, 2, 3, 4, 2)]
    assert made.captures == 4 and not torch.equal(shown[0], shown[3])
    fresh = engine(settings=replace(FULL, steps=1, strength=0.7))
    fresh.prepare(16, 24)
    assert torch.equal(shown[0], fresh(replace(frame, settings=replace(FULL, steps=1, strength=0.7))))
    made.prepare(9, 8)
    assert made.captures == 8


def test_few_programs_are_kept() -> None:
    made = engine("ddim", recorder=Counting)
    made.prepare(8, 8)
    frame = clip(1, 8, 8)[0]
    for steps in range(1, 13):
        made(replace(frame, settings=replace(FULL, steps=steps)))
    assert len(made._prepared) == 8


def test_a_new_size_starts_anew() -> None:
    first, second = clip(3, 16, 16), clip(3, 9, 21, seed=4)
    changing = engine()
    play(changing, first)
    again = play(changing, second)
    assert all(torch.equal(a, b) for a, b in zip(again, play(engine(), second), strict=True))
    with pytest.raises(RedlineError, match=r"not prepared for frames of 16×16\.$"):
        changing(first[0])


def test_a_cut_is_seen_and_a_moving_frame_is_none() -> None:
    still = clip(1, 32, 32)[0]
    bright = replace(still, pixels=(still.pixels // 8 + 220))
    dark = replace(still, pixels=still.pixels // 8)
    watching, blind = engine(cut_threshold=CUT_THRESHOLD), engine()
    seen, alone = play(watching, [dark, dark, bright, bright]), play(engine(), [bright, bright])
    assert torch.equal(seen[2], alone[0]) and torch.equal(seen[3], alone[1])
    assert not torch.equal(play(blind, [dark, dark, bright])[2], alone[0])
    assert torch.equal(seen[1], play(blind, [dark, dark])[1]), "the same scene keeps its history"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_shows_the_input_and_is_no_history(value: float) -> None:
    class Breaking(LsdFrames):
        is_broken = False

        def program(self, steps: int, height: int, width: int) -> Any:
            program, frames = super().program(steps, height, width), self
            run = program.run

            def breaking(frame: Tensor, previous: Tensor) -> Tensor:
                made = run(frame, previous)
                if frames.is_broken:
                    made[..., 3, 4] = value
                return made

            program.run = breaking
            return program

    model = Breaking(small_lsd(), Plan(), "cpu")
    made, frames = Engine(model, FULL), clip(3, 16, 16)
    made.prepare(16, 16)
    assert made.nonfinite_frames == 0
    model.is_broken = True
    shown = made(replace(frames[0], settings=FULL))
    assert torch.equal(shown[3, 4], frames[0].pixels[3, 4]) and made.nonfinite_frames == 1
    kept = made._buffers.previous[0, :, 3, 4] * 127.5 + 127.5
    assert torch.allclose(kept, frames[0].pixels[3, 4].float(), atol=1e-3)
    model.is_broken = False
    made(replace(frames[1], settings=FULL))
    assert torch.isfinite(made._buffers.previous).all() and made.nonfinite_frames == 1
    made.prepare(8, 8)
    assert made.nonfinite_frames == 1


def test_a_plan_is_applied_and_graphs_of_its_own_are_skipped() -> None:
    frames = clip(3, 16, 16)
    laid_out = engine(plan="channels_last")
    assert str(laid_out.model.plan) == "channels_last"
    for one, other in zip(play(laid_out, frames), play(engine(), frames), strict=True):
        assert (one.int() - other.int()).abs().max() <= 1
    from redline.stream.frame_model import without_cuda_graphs

    cuda = torch.device("cuda")
    kept = without_cuda_graphs(Plan.parse("bf16 + compile(mode=reduce-overhead)"), cuda)
    assert str(kept) == "bf16 + compile"
    with pytest.raises(RedlineError, match=r"onnxruntime cannot be captured"):
        without_cuda_graphs(Plan.parse("onnxruntime"), cuda)
    with pytest.raises(RedlineError, match=r"cuda_graph needs a CUDA device"):
        without_cuda_graphs(Plan.parse("cuda_graph"), torch.device("cpu"))


def test_settings_that_are_invalid_are_refused_before_a_frame_meets_them() -> None:
    made = engine()
    with pytest.raises(RedlineError, match=r"^LSD of width 16 supports at most 8 control numbers, not 9\.$"):
        made.model.check(replace(FULL, control=(0.5,) * 9))
    with pytest.raises(RedlineError, match=r"sampler 'distilled' supports 1 to 4 steps, not 5\.$"):
        made.model.check(replace(FULL, steps=5))
    with pytest.raises(RedlineError, match=r"^unknown sampler 'euler' \(supported: ddim,.*\)\.$"):
        LsdFrames(small_lsd(), Plan(), "cpu", "euler")
    made.model.check(replace(FULL, strength=0.0))


def test_a_strength_of_0_passes_frames_on_and_runs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order is kept among computed frames, and the next computed frame has no previous output."""
    frames, nothing = clip(6, 13, 9), replace(FULL, strength=0.0)
    made = engine()
    first, *_ = play(made, frames[:1])
    busy_s, runs = made.busy_s, list[int]()
    monkeypatch.setattr(made._buffers, "compute", lambda program: runs.append(1))
    for frame in frames[1:4]:
        made.begin(replace(frame, settings=nothing))
    assert made.is_done() and all(torch.equal(made.finish(), frame.pixels) for frame in frames[1:4])
    assert not runs and made.busy_s == busy_s and made.copies_s == (0.0, 0.0)
    monkeypatch.undo()
    shown = [made(replace(frame, settings=FULL)) for frame in frames[4:]]
    expected = play(engine(), frames[4:])
    assert all(torch.equal(one, other) for one, other in zip(shown, expected, strict=True))
    assert not torch.equal(first, frames[0].pixels)


def test_strength_is_how_much_of_the_change_is_shown() -> None:
    frame = clip(1, 16, 16)[0]
    made = engine()
    made.prepare(16, 16)

    def shown(strength: float) -> Tensor:
        made.reset()
        return made(replace(frame, settings=Settings(strength, 2))).float()

    given, whole = frame.pixels.float(), shown(1.0)
    assert torch.equal(shown(0.0), given) and (whole - given).abs().max() > 20
    inside = (whole > 0) & (whole < 255)  # the others were cut off after it
    for strength in (0.25, 0.5):
        assert (shown(strength) - torch.lerp(given, whole, strength))[inside].abs().max() <= 1


def test_too_little_memory_is_reported_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    fits = memory_check.needed_bytes(made.model, 300, 400)
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: fits)
    with pytest.raises(RedlineError) as caught:
        made.prepare(600, 800)
    assert str(caught.value).endswith("are free on this machine: --size 400x300 would fit.")
    assert str(caught.value).startswith("LSD of width 16 needs about ")
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: 1000)
    with pytest.raises(RedlineError, match=r"use a smaller model, or free memory\.$"):
        made.prepare(600, 800)
    monkeypatch.undo()
    made.prepare(16, 16)


def test_what_a_frame_needs_grows_with_it() -> None:
    model = engine().model
    small, large = (model.working_bytes(side, side) for side in (64, 256))
    pixels = 256 * 256 * 3 * 4
    assert 14 * small < large < 18 * small and 4 * pixels < large < 40 * pixels


def test_what_is_handed_out_is_the_takers_own() -> None:
    made, frames = engine(), clip(2, 8, 8)
    made.prepare(8, 8)
    first = made(replace(frames[0], settings=FULL))
    kept = first.clone()
    made(replace(frames[1], settings=FULL))
    assert torch.equal(first, kept) and not first.is_inference()
    first.add_(1)


def test_copies_are_timed_and_memory_stays_flat() -> None:
    made, frames = engine(), clip(20, 31, 18)
    play(made, frames)
    gc.collect()

    def tensors() -> int:
        return sum(type(thing) is Tensor for thing in gc.get_objects())

    before, places = tensors(), [tensor.data_ptr() for tensor in made._buffers.state]
    for frame in frames:
        made(replace(frame, settings=FULL))
    gc.collect()
    assert tensors() == before
    assert [tensor.data_ptr() for tensor in made._buffers.state] == places
    assert all(seconds > 0 for seconds in made.copies_s) and made.busy_s > 0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More threads do not speed up small frames, and wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread", "any_precision")
def test_the_shipped_model_stays_close_in_bf16_frame_after_frame() -> None:
    """A short version of the GPU test over a thousand frames with a graph."""
    bf16, plain = (
        Engine(LsdFrames(load_lsd(SHIPPED), Plan.parse(plan), "cpu"), FULL) for plan in ("bf16 + channels_last", "")
    )
    for one in (bf16, plain):
        one.prepare(32, 32)
    for frame in SyntheticClip(32, 32, count=12, rate=Fraction(25), motion=(1, 2)).frames():
        given = replace(frame, settings=FULL)
        error = (bf16(given).double() - plain(given).double()).square().mean()
        assert 255**2 / error > 10**3.5, f"above 35 dB, not {error} at frame {frame.index}"


@pytest.mark.slow
def test_a_compiled_plan_is_compiled_once_for_all_steps() -> None:
    compiled, frames = engine(plan="channels_last + compile(dynamic=false, fullgraph=true)"), clip(4, 16, 16)
    for one, other in zip(play(compiled, frames), play(engine(), frames), strict=True):
        assert (one.int() - other.int()).abs().max() <= 2
    assert compiled.model.plan.rungs[-1].proof(compiled.model.network.job) == "1 graph compiled, no graph break"
