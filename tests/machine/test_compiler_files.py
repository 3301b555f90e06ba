"""The compiler's test programs and header are built once per machine; `test_climb` checks that torch uses them."""

from pathlib import Path

import pytest

from redline.machine import compiler_files
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
BUILDS = """
import os, pathlib, tempfile
cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
headers = pathlib.Path(tempfile.gettempdir()) / "torchinductor_me"
for folder in (cache / "5u", cache / "locks", headers / "locks"):
    folder.mkdir(parents=True)
(cache / "5u" / "probe.so").write_text("built")
(headers / "header.h.gch").write_text("built")
"""
PROGRAM, HEADER = "5u/probe.so", "torchinductor_me/header.h.gch"


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler_files, "_BUILD", BUILDS)
    return tmp_path / "cache" / "compiled" / "prepared"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def prepare(folder: Path) -> list[str]:
    """Returns the files in a compiler's two folders after they were prepared."""
    compiler_files.prepare_compiler(CPU, folder / "cache", folder / "temporary")
    return files(folder)


def test_files_are_built_once_and_copied_for_each_climb(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [f"cache/{PROGRAM}", f"temporary/{HEADER}"]
    assert prepare(tmp_path / "one") == expected
    (known,) = prepared.iterdir()
    assert files(known) == expected
    monkeypatch.setattr(compiler_files, "_BUILD", "raise SystemExit('built twice')")
    assert prepare(tmp_path / "two") == expected
    # The header is large: all climbs share its bytes, the small programs are copied.
    two = tmp_path / "two"
    assert (two / "temporary" / HEADER).samefile(known / "temporary" / HEADER)
    assert not (two / "cache" / PROGRAM).samefile(known / "cache" / PROGRAM)


def test_the_header_is_built_although_the_user_has_disabled_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the files without it would be kept for later climbs."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(compiler_files, "_BUILD", BUILDS + "\nassert os.environ['TORCH_COMPILE_DISABLE'] == '0'")
    assert prepare(tmp_path / "one") == [f"cache/{PROGRAM}", f"temporary/{HEADER}"]


def test_a_header_without_programs_is_kept(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch builds no programs if TORCHINDUCTOR_VEC_ISA_OK is set and the CPU has only AVX2."""
    builds = "import shutil" + BUILDS + "shutil.rmtree(cache / '5u')\n"
    monkeypatch.setattr(compiler_files, "_BUILD", builds)
    assert prepare(tmp_path / "one") == [f"temporary/{HEADER}"]
    (known,) = prepared.iterdir()
    assert files(known) == [f"temporary/{HEADER}"]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    open_files = [tmp_path / "one" / "cache" / PROGRAM, tmp_path / "one" / "temporary" / HEADER]
    for path in open_files:
        path.parent.mkdir(parents=True)
        path.write_text("open")
    prepare(tmp_path / "one")
    assert [path.read_text() for path in open_files] == ["open", "open"]


@pytest.mark.parametrize("variable", ["CXX", "prefix"])
def test_another_compiler_or_torch_has_its_own_files(
    variable: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "one")
    if variable == "CXX":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.setattr("sys.prefix", "/another/environment")
    prepare(tmp_path / "two")
    assert len(list(prepared.iterdir())) == 2


def test_a_failed_build_leaves_no_files(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_files, "_BUILD", BUILDS + "\nraise SystemExit(1)")
    assert prepare(tmp_path / "one") == []
    assert not prepared.exists() and not (tmp_path / "one").exists()


def test_the_first_published_folder_is_kept(prepared: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "one")
    (known,) = prepared.iterdir()
    with pytest.raises(OSError, match="not empty"):
        compiler_files._publish(tmp_path / "one", known)
    assert list(prepared.iterdir()) == [known]


def test_without_a_writable_cache_files_are_built_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "file" / "cache"))
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert prepare(folder) == [f"cache/{PROGRAM}", f"temporary/{HEADER}"]
