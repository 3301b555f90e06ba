"""The memory estimate is close to what a frame takes on this machine."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forked_python import ForkedPython
from redline.errors import RedlineError
from redline.stream import memory_check

# The kernel's VmHWM is the peak of this process alone; `ru_maxrss` begins with the peak of the process that started it.
CODE = """
import torch
from fractions import Fraction
from redline.machine.machine import Machine
from redline.machine.host_memory import peak_resident_bytes, resident_bytes
from redline.stream.engine import Engine
from redline.stream.memory_check import needed_bytes
from redline.stream.frames import Frame
from redline.stream.loading import load_model
from redline.ladder.plans.choose import choose_plan
from redline.stream.settings import Settings

side, settings = 640, Settings(1.0, 1)
model = load_model(None, choose_plan("stream", Machine.detect("cpu")).plan, "cpu").frames
engine = Engine(model, settings)
engine.prepare(64, 64)
before = resident_bytes()
engine.prepare(side, side)
pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
engine(Frame(pixels, 0, 0, Fraction(1, 25), 0.0, settings=settings))
print(needed_bytes(model, side, side), peak_resident_bytes() - before)
"""


@pytest.mark.cpu
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_peak_memory_stays_within_the_estimate(forked_python: ForkedPython) -> None:
    ran = forked_python.run(CODE)
    assert ran.returncode == 0, ran.stderr
    said, took = map(int, ran.stdout.split())
    assert 0.5 * said < took < 1.1 * said, (said, took)


def test_weights_are_in_two_precisions_while_fp16_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"weight": torch.zeros(1000)}, tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    monkeypatch.setattr(memory_check, "free_bytes", lambda device: size)
    memory_check.check_weights_fit([tmp_path / "a.safetensors"], "a", torch.device("cpu"))
    with pytest.raises(RedlineError, match=r"^the weights of a take .*: a model of 66% of this size would fit\.$"):
        memory_check.check_weights_fit([tmp_path / "a.safetensors"], "a", torch.device("cpu"), keeps_copy=True)
