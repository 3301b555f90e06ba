"""The compiler's test programs are built once per machine; `test_climb` checks that torch uses them."""

from pathlib import Path

import pytest

from redline.machine import vector_isa
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
WRITES = "import os, pathlib; at = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR']); "
BUILDS = WRITES + "[(at / name).mkdir() for name in ('5u', 'locks')]; (at / '5u' / 'probe.so').write_text('built')"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vector_isa, "_TEST", BUILDS)
    return tmp_path / "cache"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_programs_are_built_once_and_copied_to_each_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    (known,) = cache.iterdir()
    assert files(known) == files(tmp_path / "one") == ["5u/probe.so"]
    monkeypatch.setattr(vector_isa, "_TEST", "raise SystemExit('asked twice')")
    vector_isa.prepare_cache(CPU, tmp_path / "two")
    assert files(tmp_path / "two") == ["5u/probe.so"]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    open_file = tmp_path / "one" / "5u" / "probe.so"
    open_file.parent.mkdir(parents=True)
    open_file.write_text("open")
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    assert open_file.read_text() == "open"


def test_another_compiler_has_its_own_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    monkeypatch.setenv("CXX", "no-such-compiler")
    vector_isa.prepare_cache(CPU, tmp_path / "two")
    assert len(list(cache.iterdir())) == 2


def test_a_failed_build_leaves_no_files(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_isa, "_TEST", BUILDS + "; raise SystemExit(1)")
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    assert not cache.exists() and not (tmp_path / "one").exists()


def test_the_first_published_folder_is_kept(cache: Path, tmp_path: Path) -> None:
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    (known,) = cache.iterdir()
    with pytest.raises(OSError, match="not empty"):
        vector_isa._publish(tmp_path / "one", known)
    assert list(cache.iterdir()) == [known]


def test_without_a_writable_cache_programs_are_built_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "file" / "cache"))
    for folder in (tmp_path / "one", tmp_path / "two"):
        vector_isa.prepare_cache(CPU, folder)
        assert files(folder) == ["5u/probe.so"]
