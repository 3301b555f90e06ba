"""On two cores the shipped model is live: at least ten frames a second at 256×256, through the whole pipeline.

Where there is only one core, half of that.
"""

from fractions import Fraction

import pytest
import torch

from redline.ladder.plans.choose import choose_plan
from redline.machine.cores import cores
from redline.machine.machine import Machine
from redline.models.lsd import load_lsd
from redline.stream.engine import Engine
from redline.stream.loading import SHIPPED
from redline.stream.lsd_frames import LsdFrames
from redline.stream.pipeline import Pipeline
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sinks import NullSink
from redline.stream.sources.synthetic import SyntheticClip

pytestmark = pytest.mark.alone


def test_tiny_at_256_reaches_ten_frames_a_second() -> None:
    before, threads = torch.get_num_threads(), min(2, cores())
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        once = Settings(strength=1.0, steps=1)
        frames = LsdFrames(load_lsd(SHIPPED), choose_plan("stream", Machine.detect("cpu")).plan, "cpu")
        rates: list[float] = []
        live = 0
        # Whoever else is on the machine slows some rounds: a majority of them has to be live, from end to end.
        for _ in range(5):
            clip = SyntheticClip(256, 256, count=40, rate=Fraction(60))
            report = Pipeline(clip, Engine(frames, once), NullSink(), settings=LiveSettings(once)).run().report
            rates.append(min(report.frames_per_s, 1 / report.stages["compute"].p95_s))
            live += rates[-1] >= 5 * threads
            if live == 3:
                break
        assert live == 3, rates
    finally:
        torch.set_num_threads(before)
