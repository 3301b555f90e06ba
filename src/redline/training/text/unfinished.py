"""Hidden folders for what is not whole yet, which say whose they are: so that what a killed process left is removed.

A name holds a mark of the machine, because a process number says nothing about another machine on the same disk.
"""

import hashlib
import os
import re
import secrets
import shutil
import socket
from pathlib import Path

_OWNED = re.compile(r"\..+\.([0-9a-f]{8})\.(\d+)\.[0-9a-f]{8}\.unfinished")


def make_unfinished(target: Path) -> Path:
    """A new folder beside the target."""
    path = target.parent / f".{target.name}.{_machine()}.{os.getpid()}.{secrets.token_hex(4)}.unfinished"
    path.mkdir()
    return path


def remove_abandoned(folder: Path) -> None:
    """Removes what processes of this machine that are gone left in the folder."""
    for path in folder.iterdir():
        owned = _OWNED.fullmatch(path.name)
        if owned and owned[1] == _machine() and not _is_alive(int(owned[2])):
            shutil.rmtree(path, ignore_errors=True)


def _machine() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True
