"""Keeps the files that torch.compile builds before its first CPU kernel, so that they are built only once per machine.

These files are a dozen small programs that test which vector instructions the CPU has, and a precompiled header.
Building them takes longer than compiling most models (30 s on a CPU with AMX), and the time would count as set-up
time of the first compiled plan of a climb.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from redline.machine.machine import Machine, cache_folder

# On some CPUs `valid_vec_isa_list` lists instruction sets without testing them, so `bool` is called to test each one.
# Then a function is compiled, which builds the precompiled header in the folder for temporary files.
_BUILD = """
import os, tempfile
import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list as ask
[bool(isa) for isa in ask()]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
torch.compile(torch.sin)(torch.ones(8))
"""
_TIMEOUT_S = 300


def prepare_compiler(machine: Machine, cache: Path, temporary: Path) -> None:
    """Copies the files into the compiler's folders; builds the files first if this machine has none.

    Builds them in another process, because the set-up measured in this process must be its first use of the compiler.
    `cache` is the compiler's cache, `temporary` the folder for temporary files.
    """
    known = cache_folder() / "compiled" / "prepared" / f"{machine.fingerprint}-{_compiler()}"
    with suppress(OSError, subprocess.SubprocessError, shutil.Error):
        if known.is_dir():
            _copy(known, cache, temporary)
            return
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "built"
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(built / "cache"), "TMPDIR": folder}
            environment["TORCH_COMPILE_DISABLE"] = "0"  # if compilation is disabled, no header is built
            (built / "cache").mkdir(parents=True)  # stays empty if torch is told not to test the instruction sets
            subprocess.run(
                [sys.executable, "-c", _BUILD], env=environment, check=True, capture_output=True, timeout=_TIMEOUT_S
            )
            (built / "temporary").mkdir()
            for headers in Path(folder).glob("torchinductor_*"):
                headers.rename(built / "temporary" / headers.name)
            for locks in built.rglob("locks"):
                shutil.rmtree(locks, ignore_errors=True)
            _copy(built, cache, temporary)
            _publish(built, known)


def _compiler() -> str:
    """Returns a digest of the C++ compiler, its version, and the location of torch's header files."""
    name = f"{os.environ.get('CXX', 'g++')} {sys.prefix}"
    with suppress(OSError, subprocess.SubprocessError):
        command = [os.environ.get("CXX", "g++"), "--version"]
        name += subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _copy(known: Path, cache: Path, temporary: Path) -> None:
    _copy_missing(known / "cache", cache)
    _copy_missing(known / "temporary", temporary)


def _copy_missing(source: Path, target: Path) -> None:
    """Copies a folder without overwriting files, which a process may have open. Hard-links the large header."""

    def copy(file: str, to: str) -> None:
        if Path(to).exists():
            return
        if file.endswith(".gch"):
            with suppress(OSError):  # a hard link to another file system fails
                os.link(file, to)
                return
        shutil.copy2(file, to)

    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=copy)


def _publish(built: Path, known: Path) -> None:
    """Copies the built files to the folder `known`, which appears atomically by a rename.

    Raises OSError if another process has made that folder first, and leaves it unchanged.
    """
    known.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(dir=known.parent, prefix=f".{known.name}-")
    try:
        _copy_missing(built, Path(beside))
        os.rename(beside, known)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
