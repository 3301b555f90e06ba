"""What torch.compile finds out about a CPU, kept for the next climb.

Before its first kernel it has the C++ compiler build a dozen small programs, to see which vector instructions can be
used. Where its cache is empty, as it is in every climb, that takes longer than most models do: 18 s on a CPU with AMX.
The answers are the machine's, not the model's, and would stand in the set-up time of whichever plan compiles first.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from redline.machine.machine import Machine

# On some CPUs the list is made without a question, which is asked of each when it is used.
_ASK = "from torch._inductor.cpu_vec_isa import valid_vec_isa_list as ask; [bool(isa) for isa in ask()]"
_PATIENCE_S = 300


def lay_out(machine: Machine, cache: Path) -> None:
    """Puts the programs into the cache of a compiler, which builds what is missing; builds them where nobody has yet.

    In a process of their own: a compiler that has asked before does not ask again, and its set-up is to be a first one.
    """
    known = machine.cache_path.with_name(f"vector-isa-{machine.fingerprint}-{_compiler()}")
    with suppress(OSError, subprocess.SubprocessError, shutil.Error):
        if known.is_dir():
            _copy(known, cache)
            return
        with tempfile.TemporaryDirectory() as built:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": built}
            subprocess.run(
                [sys.executable, "-c", _ASK], env=environment, check=True, capture_output=True, timeout=_PATIENCE_S
            )
            shutil.rmtree(Path(built) / "locks", ignore_errors=True)
            _copy(Path(built), cache)
            _publish(Path(built), known)


def _compiler() -> str:
    """Which compiler, and of which version: its programs are not those of another."""
    name = os.environ.get("CXX", "g++")
    with suppress(OSError, subprocess.SubprocessError):
        name += subprocess.run([name, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _copy(source: Path, target: Path) -> None:
    """What is there stays: a process may have it open."""

    def copy(file: str, to: str) -> None:
        if not Path(to).exists():
            shutil.copy2(file, to)

    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy)


def _publish(built: Path, known: Path) -> None:
    """Copied beside and renamed; whoever comes second leaves what is there."""
    known.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(dir=known.parent, prefix=f".{known.name}-")
    try:
        _copy(built, Path(beside))
        os.rename(beside, known)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
