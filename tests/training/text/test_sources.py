"""Text is found and read document by document; what is not text is refused by name."""

import builtins
import json
import os
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.training.text.sources import Sources


def test_every_kind_of_file_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.md").write_text("# zwei\n")
    (tmp_path / "deep" / "a.TXT").write_text("eins ü")
    (tmp_path / "deep" / "notes.csv").write_text("not,text")
    (tmp_path / "c.jsonl").write_text('{"text": "drei"}\n\n{"text": "   "}\n{"text": "vier", "id": 4}\n')
    found = Sources.find((str(tmp_path),))
    assert list(found.documents()) == ["# zwei\n", "drei", "vier", "eins ü"]
    assert found.size_bytes == sum(f.stat().st_size for f in found.files) and len(found.files) == 3
    assert list(Sources.find((str(tmp_path / "b.md"), str(tmp_path / "b.md"))).documents()) == ["# zwei\n"]


def test_an_unreadable_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def scandir(place: str) -> object:
        if Path(place).name == "closed":
            raise PermissionError(13, "Permission denied", place)
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(RedlineError, match="cannot read the folder '.*closed': Permission denied[.]$"):
        Sources.find((str(tmp_path),))


def test_nulls_are_passed_over_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "eins"}\n{"text": null}\n{"text": "zwei"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfdrei")
    assert list(Sources.find((str(tmp_path),)).documents()) == ["eins", "zwei", "drei"]


def test_a_separator_cuts_plain_files_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n--\n\n--\ntwo")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "x\n--\ny"}))
    found = Sources.find((str(tmp_path),), "body", "\n--\n")
    assert list(found.documents()) == ["one", "two", "x\n--\ny"]


def test_identity_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = Sources.find((str(tmp_path),)).identity
    assert Sources.find((str(tmp_path),)).identity == before
    (tmp_path / "b.txt").write_text("two")
    after = Sources.find((str(tmp_path),)).identity
    assert after != before and Sources.find((str(tmp_path),), "body").identity != after


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": 3}\n', "line 1 of .* has no string under 'text'"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2 of .* has no string"),
        ("a.jsonl", b'{"text": "x"}\n{"te', "line 2 of .* is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}', "line 2 of .* has no string under 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "half \\ud83d"}', "line 2 of .* has a lone surrogate under 'text'"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "line 1 of .* holds a number with too many digits"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000, "line 2 of .* is nested too deeply"),
        ("a.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_files_without_text_raise(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RedlineError, match=said):
        list(Sources.find((str(tmp_path),)).documents())


def test_missing_sources_raise(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    for places, said in (
        (("absent",), "no file or folder 'absent'"),
        ((str(tmp_path / "empty"),), "has no text"),
        ((str(tmp_path / "a.csv"),), "has an unknown file type"),
        ((), "no text to train on: give files or folders with --source"),
    ):
        with pytest.raises(RedlineError, match=said):
            Sources.find(places)


def test_parquet_without_pyarrow_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def refuse(name: str, *args: object) -> object:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RedlineError, match="pip install pyarrow"):
        Sources.find((str(tmp_path),))


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["eins", None, "zwei"], "id": [1, 2, 3]}), path)
    assert list(Sources.find((str(path),)).documents()) == ["eins", "zwei"]
    for field, said in (("body", "no column 'body'; it has text, id"), ("id", "does not hold text")):
        with pytest.raises(RedlineError, match=said):
            list(Sources.find((str(path),), field).documents())
    path.write_bytes(b"not parquet at all")
    with pytest.raises(RedlineError, match="not a readable Parquet"):
        list(Sources.find((str(path),)).documents())
