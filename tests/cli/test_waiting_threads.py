"""A stream's threads do not spin while they wait, and whoever asked for something else keeps it."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
sys.argv = ["redline", *sys.argv[1:]]
from redline.cli import main
assert "torch" not in sys.modules, "its threads have read their settings already"
try:
    main()
except SystemExit:
    print(os.environ.get("OMP_WAIT_POLICY", "as it is"), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "given", "found"),
    [("stream", None, "PASSIVE"), ("stream", "ACTIVE", "ACTIVE"), ("rungs", None, "as it is")],
)
def test_how_threads_wait(command: str, given: str | None, found: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    ran = subprocess.run(
        [sys.executable, "-c", CODE, command, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stderr.split()[-1:] == found.split()[-1:]
