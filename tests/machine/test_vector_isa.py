"""What a CPU's compiler was asked is asked once a machine; `test_climb` sees that torch takes the answers."""

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


def test_asked_once_and_laid_out_for_each(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    (known,) = cache.iterdir()
    assert files(known) == files(tmp_path / "one") == ["5u/probe.so"]
    monkeypatch.setattr(vector_isa, "_TEST", "raise SystemExit('asked twice')")
    vector_isa.prepare_cache(CPU, tmp_path / "two")
    assert files(tmp_path / "two") == ["5u/probe.so"]


def test_what_a_process_may_have_open_is_left_alone(tmp_path: Path) -> None:
    open_file = tmp_path / "one" / "5u" / "probe.so"
    open_file.parent.mkdir(parents=True)
    open_file.write_text("open")
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    assert open_file.read_text() == "open"


def test_another_compiler_is_asked_itself(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    monkeypatch.setenv("CXX", "no-such-compiler")
    vector_isa.prepare_cache(CPU, tmp_path / "two")
    assert len(list(cache.iterdir())) == 2


def test_an_answer_that_does_not_come_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_isa, "_TEST", BUILDS + "; raise SystemExit(1)")
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    assert not cache.exists() and not (tmp_path / "one").exists()


def test_whoever_comes_second_leaves_what_is_there(cache: Path, tmp_path: Path) -> None:
    vector_isa.prepare_cache(CPU, tmp_path / "one")
    (known,) = cache.iterdir()
    with pytest.raises(OSError, match="not empty"):
        vector_isa._publish(tmp_path / "one", known)
    assert list(cache.iterdir()) == [known]


def test_without_a_writable_cache_it_is_asked_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "file" / "cache"))
    for folder in (tmp_path / "one", tmp_path / "two"):
        vector_isa.prepare_cache(CPU, folder)
        assert files(folder) == ["5u/probe.so"]
