"""Stores the states of conversations with a model that has neural memory, one file for each session.

A session belongs to a salt (an API key). Folder and file names are hashes of the salt and of the session's name, so
that a name cannot contain a path. When all files together exceed a limit, the least recently used ones are deleted.
"""

import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from redline.errors import RedlineError

_SUFFIX = ".safetensors"


class SessionStore:
    """Keeps up to `most_bytes` of files in a folder, and deletes those not used for `most_age_s` seconds."""

    def __init__(self, folder: Path, most_bytes: int, most_age_s: float) -> None:
        if most_bytes < 1 or most_age_s <= 0:
            raise RedlineError("the size and the age of stored sessions must be above 0.")
        self.folder, self.most_bytes, self.most_age_s = folder, most_bytes, most_age_s
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RedlineError(f"cannot create the folder {str(folder)!r}: {error.strerror or error}.") from error
        self.expire()

    def load(self, salt: str, session: str, like: Any) -> Any:
        """Returns the state of a session, or None if there is none. `like` is a state of the model."""
        path = self._path(salt, session)
        if not path.exists() or time.time() - path.stat().st_mtime > self.most_age_s:
            return None
        state = like.load(path)
        path.touch()
        return state

    def save(self, salt: str, session: str, state: Any) -> None:
        """Writes the state to the session's file, as a whole or not at all, then deletes expired sessions."""
        path = self._path(salt, session)
        try:
            path.parent.mkdir(exist_ok=True)
            state.save(path)
        except OSError as error:
            raise RedlineError(f"the session could not be stored: {error.strerror or error}.") from error
        self.expire(keep=path)

    def delete(self, salt: str, session: str) -> bool:
        """Deletes a session, and returns whether it existed."""
        path = self._path(salt, session)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed

    def expire(self, keep: Path | None = None) -> None:
        """Deletes files that are too old, then the least recently used ones until the rest fits, but not `keep`."""
        found = []
        for path in self.folder.glob(f"*/*{_SUFFIX}"):
            try:
                about = path.stat()
            except FileNotFoundError:
                continue
            found.append((about.st_mtime, about.st_size, path))
        total, oldest = sum(size for _, size, _ in found), time.time() - self.most_age_s
        for used, size, path in sorted(found):
            if path != keep and (used < oldest or total > self.most_bytes):
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, salt: str, session: str) -> Path:
        names = (sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in (salt, session))
        return self.folder / next(names) / (next(names) + _SUFFIX)
