"""Hidden names for what is not whole yet, which say whose it is: so that what a killed run left can be removed.

A name ends in the process and in a token that begins with a mark of the machine, because a process number says nothing
about a process of another machine that writes to the same folder.
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
# Characters of the target's name in the hidden one, which must not become longer than a name may be.
_NAME_LENGTH = 40
_OWNER = re.compile(r"\.(\d+)\.([0-9a-f]{4})[0-9a-f]{8}" + re.escape(_PARTIAL))
_RECORDING = re.compile(r"(.+)\.recording-(\d+)(?:-(\d+))?-([0-9a-f]{4})[0-9a-f]{8}(\.\w+)")


def hidden_path(path: Path) -> Path:
    """A new name beside the target."""
    token = _machine() + secrets.token_hex(4)
    return path.parent / f".{path.name[:_NAME_LENGTH]}.{os.getpid()}.{token}{_PARTIAL}"


def recording_path(path: Path) -> Path:
    """Returns a new name beside the target for a live recording. It is not hidden, and ends as the target does: should
    the process be killed, it is found and can be played as it is. It holds the start time of the process, because a
    restarted container has the same process numbers."""
    owner = "-".join(filter(None, (str(os.getpid()), _born(os.getpid()), _machine() + secrets.token_hex(4))))
    return path.parent / f"{path.stem[:_NAME_LENGTH]}.recording-{owner}{path.suffix}"


def abandoned_recordings(folder: Path) -> list[tuple[Path, Path]]:
    """Returns the recordings that processes of this machine that are gone left in the folder, each with its target.
    Skips symbolic links and everything else that is not a regular file."""
    try:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()]
    except OSError:
        return []  # there is no such folder yet, or whoever writes there will say what is wrong with it
    return [
        (path, folder / f"{owner[1]}{owner[5]}")
        for path in files
        if (owner := _RECORDING.fullmatch(path.name)) is not None
        and owner[4] == _machine()
        and not _is_running(int(owner[2]), owner[3])
    ]


def is_partial(path: Path | str) -> bool:
    """Whether a file or folder is what a run has not finished, or left when it was killed."""
    name = Path(path).name
    return name.startswith(".") and name.endswith(_PARTIAL)


def remove_abandoned(folder: Path) -> None:
    """Removes what processes of this machine that are gone left half written in the folder."""
    try:
        partial = [path for path in folder.iterdir() if is_partial(path)]
    except OSError:
        return  # there is no such folder yet, or whoever writes there will say what is wrong with it
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
    """Says whose something is, for `check_is_free`."""
    return f"{os.getpid()} {_machine()} {_born(os.getpid())}"


def check_is_free(path: Path, refusal: str) -> None:
    """Raises `refusal` where the file holds the mark of another process of this machine that is still there."""
    try:
        with reading(path, "mark of a process"):
            process, machine, born, *_ = f"{read_text(path).strip()}   ".split(" ")
    except RedlineError:
        return  # nobody's, or nobody's who can be known
    if machine != _machine() or not re.fullmatch("[0-9]{1,9}", process):
        return
    if int(process) != os.getpid() and _is_running(int(process), born):
        raise RedlineError(refusal)


@contextlib.contextmanager
def claimed(path: Path, refusal: str) -> Iterator[None]:
    """Holds a file that says who is at work; raises `refusal` while another process of this machine holds it."""
    check_is_free(path, refusal)
    is_new = not path.parent.exists()
    write_text(path, owner_mark())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # where nothing came of it


def _machine() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=2).hexdigest()


def _born(process: int) -> str:
    """When it began, in ticks since the machine did; nothing where the system does not tell."""
    try:
        # The second field is a name in brackets, and may hold anything.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_running(process: int, born: str | None) -> bool:
    """Returns whether the process that began at this time is there; without a time, any process of this number."""
    # A number is given to another process after a while, and soon after a restart.
    return _is_alive(process) and (not born or born == _born(process))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True
