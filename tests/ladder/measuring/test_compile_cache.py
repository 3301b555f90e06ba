"""The compile cache: kept between climbs, and bounded."""

import os
from pathlib import Path

import pytest

from redline.ladder.measuring.compile_cache import compile_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    return tmp_path / "compiled"


def test_the_oldest_entries_go_first(folder: Path) -> None:
    for age, name in enumerate(("inductor/new", "triton/middle", "inductor/old")):
        entry = folder / name
        (entry / "deep").mkdir(parents=True)
        (entry / "deep" / "kernel").write_bytes(bytes(2**20))
        os.utime(entry, (1e9 - age, 1e9 - age))
    assert compile_cache(10 * 2**20) == folder and (folder / "inductor/old").exists()
    compile_cache(int(2.5 * 2**20))
    assert sorted(path.name for path in folder.glob("*/*")) == ["middle", "new"]


def test_no_cache_is_no_error(folder: Path) -> None:
    assert compile_cache() == folder
