"""OpenVINO sets up the handling of signals in the thread that loads it."""

import importlib.util

import pytest

from forked_python import ForkedPython

AFTER_ANOTHER_THREAD_FREED_IT = """
import gc, os, signal, threading
import torch
from redline.ladder.rungs.openvino import OpenvinoEngine

engines = [OpenvinoEngine(torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),), {}, "keep")]
thread = threading.Thread(target=engines.clear)
thread.start()
thread.join()
gc.collect()
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="OpenVINO is not installed")
def test_signals_are_handled_after_another_thread_freed_the_engine(forked_python: ForkedPython) -> None:
    """OpenVINO would free the stack on which the main thread handles signals."""
    done = forked_python.run(AFTER_ANOTHER_THREAD_FREED_IT)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
