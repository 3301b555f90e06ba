"""Importing operators costs nothing that only a GPU needs."""

import subprocess
import sys
from pathlib import Path

import redline.ops


def test_importing_the_operators_starts_neither_triton_nor_cuda() -> None:
    folder = Path(redline.ops.__file__).parent
    names = sorted(f"redline.ops.{path.parent.name}" for path in folder.glob("*/__init__.py"))
    assert "redline.ops.rms_norm" in names
    look = f"import sys, torch, {', '.join(names)}; sys.exit('triton' in sys.modules or torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", look], timeout=120).returncode == 0
