"""On a GPU one graph per frame gives what the CPU gives, settings change without a new capture, memory is constant."""

import gc
import threading
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.ladder.plan import Plan
from redline.ladder.plans.choose import choose_plan
from redline.machine.machine import Machine
from redline.models.lsd import load_lsd
from redline.stream.engine import CUT_THRESHOLD, Engine
from redline.stream.frames import Frame
from redline.stream.loading import SHIPPED
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Pipeline
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sources.synthetic import SyntheticClip
from stream.doubles import Kept
from stream.small_models import clip, small_lsd

pytestmark = pytest.mark.gpu
FULL = Settings(strength=1.0, steps=2)


def engine(
    plan: str = "", device: str = "cuda:0", spread: float = 0.15, sampler: str = "distilled", **options: Any
) -> Engine:
    return Engine(LsdFrames(small_lsd(spread=spread), Plan.parse(plan), device, sampler), FULL, **options)


def same_noise(*engines: Engine) -> None:
    """Gives all engines the noise of the first, because devices draw different numbers for a seed."""
    first, *others = [one._prepared[FULL.steps].program._noise_N for one in engines]
    for other in others:
        with torch.inference_mode():
            other.copy_(first)


def play(engine: Engine, frames: list[Frame]) -> list[Tensor]:
    return [engine(replace(frame, settings=FULL)) for frame in frames]


def psnr_db(one: Tensor, other: Tensor) -> float:
    error = (one.double() - other.double()).square().mean().clamp_min(1e-6)
    return float(10 * (255**2 / error).log10())


@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 50), (1, 1)])
def test_a_graph_gives_what_the_cpu_gives(height: int, width: int) -> None:
    frames = clip(12, height, width)
    fast, plain = engine(spread=0.05), engine(device="cpu", spread=0.05)
    for one in (fast, plain):
        one.prepare(height, width)
    same_noise(plain, fast)
    for made, expected in zip(play(fast, frames), play(plain, frames), strict=True):
        assert made.shape == (height, width, 3) and made.device.type == "cpu"
        # On a single pixel one step of a byte is a large error.
        assert psnr_db(made, expected) > (60 if height > 1 else 45)
    assert fast.captures == 4


def test_a_graph_gives_bit_for_bit_what_the_same_kernels_give_unrecorded() -> None:
    class Unrecorded:
        def __init__(self, device: torch.device) -> None: ...

        def supports(self, tensors: list[Tensor]) -> bool:
            return True

        def warm_up(self, run: Any) -> Any:
            return run()

        def capture(self, run: Any) -> Any:
            return None, run

        def pool_bytes(self) -> int:
            return 0

    frames = clip(20, 48, 80)
    graphed, plain = engine(), engine(recorder=Unrecorded)
    for one in (graphed, plain):
        one.prepare(48, 80)
    for made, expected in zip(play(graphed, frames), play(plain, frames), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("plan", ["bf16 + channels_last", "fp16 + channels_last", "bf16 + channels_last + compile"])
def test_plans_stay_close_over_many_frames(plan: str) -> None:
    frames = clip(50, 64, 64)
    fast, plain = engine(plan, spread=0.05), engine(spread=0.05)
    for one in (fast, plain):
        one.prepare(64, 64)
    same_noise(plain, fast)
    for made, expected in zip(play(fast, frames), play(plain, frames), strict=True):
        assert psnr_db(made, expected) > 40


@pytest.mark.parametrize("given", ["", "bf16 + channels_last + compile"])
def test_the_shipped_model_stays_close_and_memory_flat_over_a_thousand_frames(given: str) -> None:
    """Compares the shipped plan with its graph, and a compiled one, with plain fp32."""
    plan = Plan.parse(given) if given else choose_plan("stream", Machine.detect("cuda")).plan
    fast = Engine(LsdFrames(load_lsd(SHIPPED), plan, "cuda:0"), FULL)
    plain = Engine(LsdFrames(load_lsd(SHIPPED), Plan(), "cuda:0"), FULL, recorder=lambda _device: None)
    for one in (fast, plain):
        one.prepare(256, 256)
    same_noise(plain, fast)
    memory = set()
    for frame in SyntheticClip(256, 256, count=1000, rate=Fraction(25), motion=(1, 2)).frames():
        given = replace(frame, settings=FULL)
        assert psnr_db(fast(given), plain(given)) > 35, frame.index
        if frame.index >= 20:
            torch.cuda.synchronize()
            memory.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(memory) == 1


@pytest.mark.parametrize(("sampler", "recordings"), [("distilled", 4), ("ddim", 2)])
def test_settings_and_few_steps_change_without_a_new_capture(sampler: str, recordings: int) -> None:
    made = engine(sampler=sampler)
    made.prepare(64, 64)
    frame = clip(1, 64, 64)[0]

    def shown(**changes: Any) -> Tensor:
        made.reset()
        return made(replace(frame, settings=replace(FULL, **changes)))

    plain = shown()
    for changes in ({"strength": 0.4}, {"seed": 9}, {"control": (1.0, 0.5)}):
        assert not torch.equal(shown(**changes), plain), changes
        assert torch.equal(shown(), plain), changes
    assert made.captures == (4 if sampler == "distilled" else 1)
    assert not torch.equal(shown(steps=1), plain) and torch.equal(shown(), plain)
    shown(steps=1)
    assert made.captures == recordings


def test_frames_that_are_passed_through_keep_their_place_among_those_in_flight() -> None:
    frames, made = clip(4, 64, 64), engine()
    made.prepare(64, 64)
    strengths = (1.0, 0.0, 0.0, 1.0)
    alone = [made(replace(frames[index], settings=FULL)) for index in (0,)]
    made.reset()
    given = [replace(frame, settings=replace(FULL, strength=at)) for frame, at in zip(frames, strengths, strict=True)]
    shown = list[Tensor]()
    for number, frame in enumerate(given):
        made.begin(frame)
        if number:
            shown.append(made.finish())
    shown.append(made.finish())
    made.reset()
    alone.append(made(replace(frames[3], settings=FULL)))
    assert torch.equal(shown[0], alone[0]) and torch.equal(shown[3], alone[1])
    assert all(torch.equal(shown[index], frames[index].pixels) for index in (1, 2))


def test_capturing_other_steps_keeps_the_previous_output() -> None:
    frames, turns = clip(6, 32, 32), [2, 1, 2, 3, 1, 2]
    late, early = engine(sampler="ddim"), engine(sampler="ddim")
    for one in (late, early):
        one.prepare(32, 32)
    for steps in (1, 3):
        early(replace(frames[0], settings=replace(FULL, steps=steps)))
    early.reset()
    for frame, steps in zip(frames, turns, strict=True):
        frame = replace(frame, settings=replace(FULL, steps=steps))
        assert torch.equal(late(frame), early(frame))
    assert late.captures == early.captures == 3


def test_memory_is_flat_to_the_byte() -> None:
    made, frames = engine("bf16 + channels_last", cut_threshold=CUT_THRESHOLD), clip(10, 100, 60)
    made.prepare(100, 60)
    for frame in frames:
        made(replace(frame, settings=FULL))
        made(replace(frame, settings=replace(FULL, steps=1, seed=3)))
    torch.cuda.synchronize()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    for turn in range(200):
        settings = replace(FULL, steps=1 + turn % 2, strength=0.5 + (turn % 5) / 10, control=(turn / 200,))
        made(replace(frames[turn % 10], settings=settings))
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_a_new_size_gives_the_old_ones_memory_back() -> None:
    # What earlier tests left is freed now, not in the middle of this one.
    gc.collect()
    made = engine()
    made.prepare(256, 256)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for height, width in [(64, 96), (512, 256), (31, 17), (256, 256)]:
        made.prepare(height, width)
        made(replace(clip(1, height, width)[0], settings=FULL))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_show_the_input_inside_a_graph_too(value: float) -> None:
    made, frame = engine(), replace(clip(1, 32, 32)[0], settings=FULL)
    with torch.no_grad():
        made.model.network.model.head.bias.fill_(value)
    made.prepare(32, 32)
    assert torch.equal(made(frame), frame.pixels) and made.nonfinite_frames == 1
    assert torch.isfinite(made._buffers.previous).all()


def test_overlapped_frames_are_those_of_one_by_one_and_copies_are_timed() -> None:
    frames = clip(9, 64, 48)
    one_by_one, deep = engine(), engine()
    for one in (one_by_one, deep):
        one.prepare(64, 48)
    expected, made = play(one_by_one, frames), []
    for frame in frames:
        deep.begin(replace(frame, settings=FULL))
        if frame.index:
            made.append(deep.finish())
    while not deep.is_done():
        time.sleep(1e-4)
    made.append(deep.finish())
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert all(0 < seconds < 1 for seconds in deep.copies_s) and deep.busy_s > 0
    assert deep.max_in_flight == 2


@pytest.mark.timeout(60)
def test_a_stream_runs_with_settings_changed_from_another_thread() -> None:
    made = engine("bf16 + channels_last")
    settings = LiveSettings(FULL, made.model.check)
    sink = Kept()
    pipeline = Pipeline(SyntheticClip(96, 128, count=300, rate=Fraction(25)), made, sink, settings=settings)
    stop = threading.Event()

    def change() -> None:
        for turn in range(10_000):
            if stop.wait(0.002):
                return
            settings.change(strength=0.3 + (turn % 7) / 10, seed=turn, steps=1 + turn % 3)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        outcome = pipeline.run()
    finally:
        stop.set()
        changer.join()
    assert outcome.complete and sink.indices == list(range(300))
    assert made.captures == 4
