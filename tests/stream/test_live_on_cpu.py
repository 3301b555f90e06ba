"""On two cores the tiny model is live: at least ten frames a second at 256×256, through the whole pipeline."""

import os
from fractions import Fraction

import pytest
import torch

from redline.machine import Machine
from redline.models.lsd import Lsd, LsdConfig
from redline.stream.engine import Engine
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Pipeline
from redline.stream.plans import choose_plan
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks.null import NullSink
from redline.stream.sources.synthetic import SyntheticClip

pytestmark = pytest.mark.alone
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_tiny_at_256_reaches_ten_frames_a_second() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        once = Settings(strength=1.0, steps=1)
        frames = LsdFrames(Lsd(LsdConfig.of("tiny")), choose_plan(Machine.detect("cpu")), "cpu")
        best = 0.0
        # Whoever else is on the machine slows some rounds, and makes none faster.
        for _ in range(12):
            clip = SyntheticClip(256, 256, count=20, rate=Fraction(60))
            outcome = Pipeline(clip, Engine(frames, once), NullSink(), settings=LiveSettings(once)).run()
            best = max(best, outcome.report.frames_per_s)
            if best >= 10:
                break
        assert best >= 10
    finally:
        torch.set_num_threads(before)
