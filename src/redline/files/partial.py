"""Hidden names for incomplete files, which identify their process so that files of a killed process can be removed.

A name ends with the process id and a token that begins with a hash of the host name, because processes of another
machine may write to the same folder.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.untrusted import read_text, reading

_PARTIAL = ".redline-partial"
# The hidden name keeps this many characters of the target's name, to stay within the file system's limit.
_NAME_LENGTH = 40
_OWNER = re.compile(r"\.(\d+)\.([0-9a-f]{4})[0-9a-f]{8}" + re.escape(_PARTIAL))
_RECORDING = re.compile(r"(.+)\.recording-(\d+)(?:-(\d+))?-([0-9a-f]{4})[0-9a-f]{8}(\.\w+)")


def hidden_path(path: Path) -> Path:
    """Returns a new hidden name in the target's folder."""
    token = _machine() + secrets.token_hex(4)
    return path.parent / f".{path.name[:_NAME_LENGTH]}.{os.getpid()}.{token}{_PARTIAL}"


def recording_path(path: Path) -> Path:
    """Returns a new name in the target's folder for a live recording.

    The name is not hidden and has the target's suffix, so that the user can find and play the file if the process is
    killed. It contains the start time of the process, because a restarted container reuses process ids.
    """
    owner = "-".join(filter(None, (str(os.getpid()), _start_time(os.getpid()), _machine() + secrets.token_hex(4))))
    return path.parent / f"{path.stem[:_NAME_LENGTH]}.recording-{owner}{path.suffix}"


def abandoned_recordings(folder: Path) -> list[tuple[Path, Path]]:
    """Returns the recordings in the folder whose processes on this machine have ended, each with its final path.

    Skips symbolic links and all other entries that are not regular files.
    """
    try:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()]
    except OSError:
        return []  # the folder does not exist yet, or writing to it will report the error
    return [
        (path, folder / f"{owner[1]}{owner[5]}")
        for path in files
        if (owner := _RECORDING.fullmatch(path.name)) is not None
        and owner[4] == _machine()
        and not _is_running(int(owner[2]), owner[3])
    ]


def is_partial(path: Path | str) -> bool:
    """Returns whether a file or folder has the name of an incomplete output."""
    name = Path(path).name
    return name.startswith(".") and name.endswith(_PARTIAL)


def remove_abandoned(folder: Path) -> None:
    """Removes the incomplete outputs in the folder whose processes on this machine have ended."""
    try:
        partial = [path for path in folder.iterdir() if is_partial(path)]
    except OSError:
        return  # the folder does not exist yet, or writing to it will report the error
    for path in partial:
        owner = _OWNER.search(path.name)
        if owner is None or owner[2] != _machine() or _is_alive(int(owner[1])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def owner_mark() -> str:
    """Returns the content of a lock file of this process, for `check_is_free`."""
    return f"{os.getpid()} {_machine()} {_start_time(os.getpid())}"


def check_is_free(path: Path, message: str) -> None:
    """Raises a RedlineError with `message` if the lock file belongs to another running process of this machine."""
    try:
        with reading(path, "lock file"):
            process, machine, start_time, *_ = f"{read_text(path).strip()}   ".split(" ")
    except RedlineError:
        return  # there is no lock file, or it cannot be read
    if machine != _machine() or not re.fullmatch("[0-9]{1,9}", process):
        return
    if int(process) != os.getpid() and _is_running(int(process), start_time):
        raise RedlineError(message)


@contextlib.contextmanager
def claimed(path: Path, message: str) -> Iterator[None]:
    """Holds a lock file during the block; raises a RedlineError with `message` if another local process holds it."""
    check_is_free(path, message)
    is_new = not path.parent.exists()
    write_text(path, owner_mark())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # removes the folder if nothing was written to it


def _machine() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=2).hexdigest()


def _start_time(process: int) -> str:
    """Returns the start time of a process in ticks since boot, or "" if the system does not provide it."""
    try:
        # The second field is the name in brackets, which may contain spaces and brackets.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_running(process: int, start_time: str | None) -> bool:
    """Returns whether the process is running; the start time, if known, detects a reused process id."""
    return _is_alive(process) and (not start_time or start_time == _start_time(process))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # the process runs as another user
    return True
