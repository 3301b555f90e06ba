"""Whatever is in a file that somebody else wrote, its reader returns or raises the project's error.

A new reader is added to `READERS` in readers.py: how to write a valid file, how to read it, and a fuzzer of its format.
`REDLINE_FUZZ=2000` tries more variants of each file.
"""

import itertools
import os
import random
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from redline.errors import ModelError, PlanError, RedlineError
from redline.files import untrusted

from .readers import READERS, Reader

COUNT = int(os.environ.get("REDLINE_FUZZ", "60"))


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name.replace(" ", "-"))
def test_malformed_files_are_refused(reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    path = reader.write(tmp_path)
    sample = path.read_bytes()
    reader.read(path)  # what is valid is read
    refused = 0
    for number, content in enumerate(itertools.islice(reader.fuzz(sample, random.Random(26)), COUNT)):
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(path)
        except RedlineError as error:
            refused += 1
            assert str(error).endswith(".") and "\n" not in str(error) and len(str(error)) < 2000, error
        except Exception as error:
            kept = Path(os.environ.get("REDLINE_FUZZ_KEEP", tmp_path)) / f"{reader.name.replace(' ', '-')}-{number}"
            kept.write_bytes(content)
            raise AssertionError(f"{reader.name}: variant {number}, in {kept}: {content[:300]!r}") from error
    assert refused or reader.name in _FORGIVING


# What is damaged there is left out or made again.
_FORGIVING = ("machine cache", "history", "upscale journal", "job of a video", "part of a video", "owner")


def test_errors_name_the_file_and_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, words in (
        ("[" * 200_000, "is not a readable plan: it is nested too deeply."),
        ("[" * 101 + "]" * 101, "it is nested too deeply."),
        ("9" * 5000, "it holds a number with too many digits."),
        ('"\\ud800"', "it contains a lone surrogate"),
        ("{", "it is not JSON (Expecting"),
        (b"\xff", "it is not UTF-8 text (invalid start byte at byte 0)."),
    ):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(PlanError) as caught:
            untrusted.read_json(path, "plan", PlanError)
        assert str(caught.value).startswith(repr(str(path))) and words in str(caught.value)
    for missing, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "it is a folder")):
        with pytest.raises(ModelError) as caught:
            untrusted.read_json_object(missing, "config", ModelError)
        assert str(caught.value) == f"cannot read the config {str(missing)!r}: {why}."


def test_a_file_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(untrusted, "MAX_BYTES", 1 << 20)
    with pytest.raises(RedlineError, match=r"^'/dev/zero' is not a readable plan: it has more than 1 MiB\.$"):
        untrusted.read_toml("/dev/zero", "plan")


def test_only_what_malformed_content_causes_is_converted(tmp_path: Path) -> None:
    class Bug(Exception):
        pass

    with pytest.raises(Bug), untrusted.reading(tmp_path, "plan"):
        raise Bug
    with pytest.raises(PlanError, match="as it is"), untrusted.reading(tmp_path, "config", ModelError):
        raise PlanError("as it is.")
    with suppress(RedlineError):
        assert untrusted.parse_json("1", "x") == 1
