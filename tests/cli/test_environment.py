"""Environment variables that torch reads at import are set before, unless the user has set them."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys

def tell():
    print(os.environ.get("VARIABLE", "unset"), file=sys.stderr, flush=True)
    os._exit(0)

class Torch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            tell()

sys.argv = ["redline", *sys.argv[1:]]
sys.meta_path.insert(0, Torch)
from redline.cli import main
try:
    main()
except SystemExit:
    tell()
"""


def found(variable: str, command: str, given: str | None) -> str:
    """What stands there at the moment when torch would be imported, or at the end of a command without it."""
    environment = {key: value for key, value in os.environ.items() if key != variable}
    if given is not None:
        environment[variable] = given
    code = CODE.replace("VARIABLE", variable)
    ran = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    return ran.stderr.split()[-1]


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [("stream", None, "PASSIVE"), ("stream", "ACTIVE", "ACTIVE"), ("rungs", None, "unset")],
)
def test_a_streams_threads_do_not_spin_while_they_wait(command: str, given: str | None, expected: str) -> None:
    assert found("OMP_WAIT_POLICY", command, given) == expected


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("stream", None, "1"),
        ("upscale", None, "1"),
        ("upscale", "0", "0"),
        ("climb", None, "unset"),
    ],
)
def test_pictures_are_computed_in_large_pages(command: str, given: str | None, expected: str) -> None:
    assert found("THP_MEM_ALLOC_ENABLE", command, given) == expected
