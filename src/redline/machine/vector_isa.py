"""Caches torch.compile's test of the CPU's vector instructions between climbs.

Before its first kernel, torch.compile has the C++ compiler build a dozen small programs, to test which vector
instructions work. With an empty cache, as in every climb, the test takes longer than compiling most models: 18 s on a
CPU with AMX. The result depends on the machine alone, but the time would count as set-up time of the first plan that
compiles.
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

# On some CPUs `valid_vec_isa_list` lists instruction sets without testing them; `bool` tests each.
_TEST = "from torch._inductor.cpu_vec_isa import valid_vec_isa_list as ask; [bool(isa) for isa in ask()]"
_TIMEOUT_S = 300


def prepare_cache(machine: Machine, cache: Path) -> None:
    """Copies the test programs into the compiler's cache folder; builds them first if this machine has none.

    Builds them in another process, so that the set-up measured in this process is its first use of the compiler.
    """
    known = machine.cache_path.with_name(f"vector-isa-{machine.fingerprint}-{_compiler()}")
    with suppress(OSError, subprocess.SubprocessError, shutil.Error):
        if known.is_dir():
            _copy(known, cache)
            return
        with tempfile.TemporaryDirectory() as built:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": built}
            subprocess.run(
                [sys.executable, "-c", _TEST], env=environment, check=True, capture_output=True, timeout=_TIMEOUT_S
            )
            shutil.rmtree(Path(built) / "locks", ignore_errors=True)
            _copy(Path(built), cache)
            _publish(Path(built), known)


def _compiler() -> str:
    """Returns a digest of the C++ compiler and its version."""
    name = os.environ.get("CXX", "g++")
    with suppress(OSError, subprocess.SubprocessError):
        name += subprocess.run([name, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _copy(source: Path, target: Path) -> None:
    """Copies a folder without overwriting files, which a process may have open."""

    def copy(file: str, to: str) -> None:
        if not Path(to).exists():
            shutil.copy2(file, to)

    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy)


def _publish(built: Path, known: Path) -> None:
    """Moves a copy to its final name atomically; keeps a folder that another process published first."""
    known.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(dir=known.parent, prefix=f".{known.name}-")
    try:
        _copy(built, Path(beside))
        os.rename(beside, known)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
