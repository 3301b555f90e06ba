"""The lock of an output folder: one climb at a time, and nothing is left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.ladder.search.climb import climb
from redline.ladder.search.output_lock import locked


def test_two_climbs_cannot_write_into_the_same_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "out").mkdir()
    (out / "measurements.jsonl").write_text("earlier\n")
    with locked(out):
        with pytest.raises(RedlineError, match=rf"another climb \(process {os.getpid()}\) is writing to .*--out"):
            climb("resnet", out=out, device="cpu", progress=None)
        assert (out / "measurements.jsonl").read_text() == "earlier\n"
    with locked(out), locked(tmp_path / "other"), locked(None):
        pass
    assert [path.name for path in out.iterdir()] == ["measurements.jsonl"] and not (tmp_path / "other").exists()


def test_a_killed_climb_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from redline.ladder.search.output_lock import locked\n"
        "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert list(tmp_path.iterdir())  # the file is there, but nobody holds it
    with locked(tmp_path):
        pass
