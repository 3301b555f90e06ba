"""Files are whole or not there, and what keeps them from being written is one sentence."""

import errno
import os
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.files.atomic import write_text


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_reported_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RedlineError, match=r"^cannot write '.*a.txt': No space left on device\.$") as seen:
        write_text(path, "new")
    assert isinstance(seen.value, OSError) and seen.value.errno == errno.ENOSPC
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RedlineError, match="cannot write '.*/file/b.txt': "):
        write_text(tmp_path / "file" / "b.txt", "")
