"""The load of other processes: a busy neighbor is seen, our own processes are not."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from redline.machine import load
from redline.machine.load import Load, LoadMeter, current_load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.3)
    yield process
    process.kill()
    process.wait()


def test_a_busy_neighbor_is_seen_and_our_own_process_is_not(busy: subprocess.Popen[bytes]) -> None:
    used_s = load._process_s(busy.pid)
    others, own = LoadMeter(), LoadMeter([busy.pid])
    time.sleep(1.0)
    seen, without = others.read(), own.read()
    used_s = load._process_s(busy.pid) - used_s
    # Other tests may run beside this one, but both meters saw them.
    assert used_s > 0 and seen.other_cores - without.other_cores == pytest.approx(used_s, abs=0.1)
    assert current_load(0.2).other_cores >= 0


def test_contention_depends_on_the_cores_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "cores", lambda: 2)
    assert not Load(0.2).is_contended(cuda=False) and Load(0.5).is_contended(cuda=False)
    assert Load(2.0).slowdown() == 1.5 and Load(0.0).slowdown() == 1.0
    monkeypatch.setattr(load, "cores", lambda: 16)
    assert not Load(8.0).is_contended(cuda=True) and Load(15.0).is_contended(cuda=True)
    assert Load(8.0).is_contended(cuda=False)
    assert str(Load(1.93, 212.4)) == "other processes used 1.9 of 16 cores, preempted 212 times a second"


def test_a_process_that_has_ended_has_no_load() -> None:
    assert load._process_s(2**30) == 0.0 and load._involuntary_switches(2**30) == 0
