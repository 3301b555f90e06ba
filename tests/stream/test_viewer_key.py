"""The key of a stream's viewers comes from an option, a file or the environment."""

from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.stream.viewer_key import read_key


def test_a_file_holds_the_key_in_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for text in ("correct horse\n", "  correct horse \r\nsecond line\n", "correct horse"):
        path.write_bytes(text.encode())
        assert read_key(None, path, False) == "correct horse"
    for data, said in (
        (b"", "the first line must be a key"),
        (b"\n\n", "the first line must be a key"),
        (b"x" * 2000, "the first line must be a key"),
        (b"\xff", "not valid UTF-8"),
    ):
        path.write_bytes(data)
        with pytest.raises(RedlineError, match=said):
            read_key(None, path, True)
    with pytest.raises(RedlineError, match=r"^cannot read the key from '.*none': No such file or directory\.$"):
        read_key(None, tmp_path / "none", True)
    with pytest.raises(RedlineError, match=r"^--key and --key-file were both given: give only one\.$"):
        read_key("a", path, True)


def test_the_environment_has_the_key_of_streams_that_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDLINE_KEY", raising=False)
    assert read_key(None, None, True) is None
    monkeypatch.setenv("REDLINE_KEY", "")
    assert read_key(None, None, True) is None
    monkeypatch.setenv("REDLINE_KEY", "correct horse")
    assert read_key(None, None, True) == "correct horse" and read_key(None, None, False) is None
    assert read_key("another", None, True) == "another"
