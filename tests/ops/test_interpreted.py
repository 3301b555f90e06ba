"""Runs the tests of the Triton kernels where there is no GPU: interpreted, in processes of their own.

Triton decides when it is imported whether it interprets, and torch imports it for tests that must not.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
TESTS = sorted(FOLDER.glob("*/test_triton.py"))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these tests as they are")
@pytest.mark.parametrize("half", [0, 1])
def test_the_kernels_pass_their_tests_when_interpreted(half: int) -> None:
    # Two processes rather than one for each operator, most of whose time would be the start.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", *map(str, TESTS[half::2])]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
