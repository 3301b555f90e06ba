"""A workload's digest changes only with modules that it imports from its own folder or package."""

from pathlib import Path

import pytest

from redline.ladder.search.source_digest import describe_change, digest_sources


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_file_and_its_neighbours(tmp_path: Path) -> None:
    write(
        tmp_path,
        mine="import json, torch\nimport net\ndef f():\n    from layers import Layer\n",
        net="from blocks.wide import Wide\nfrom redline import Workload\n",
        layers="",
        blocks__wide="import net\n",
        unused="",
    )
    (tmp_path / "blocks/__init__.py").write_text("")
    address = f"{tmp_path / 'mine.py'}:f"
    before = digest_sources(address)
    assert list(before) == ["blocks/__init__.py", "blocks/wide.py", "layers.py", "mine.py", "net.py"]
    (tmp_path / "unused.py").write_text("1\n")
    assert digest_sources(address) == before
    (tmp_path / "blocks/wide.py").write_text("import net\nx = 1\n")
    assert describe_change(before, digest_sources(address)) == "blocks/wide.py has changed"


def test_a_package_with_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        shop__work="from .parts import engine\nfrom . import wheels\nfrom ..beyond import x\n",
        shop__parts__engine="from ... import far\nfrom shop import doors\n",
        shop__wheels="",
        shop__doors="",
    )
    for folder in ("shop", "shop/parts"):
        (tmp_path / folder / "__init__.py").write_text("")
    expected = ["__init__", "doors", "parts/__init__", "parts/engine", "wheels", "work"]
    assert list(digest_sources("shop.work:f")) == [f"shop/{name}.py" for name in expected]


def test_installed_workload_only_covers_its_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages"
    write(installed, zoo__work="import other\nfrom zoo import lion\n", zoo__lion="", other="")
    (installed / "zoo/__init__.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    assert list(digest_sources("zoo.work:f")) == ["zoo/__init__.py", "zoo/lion.py", "zoo/work.py"]


def test_bundled_workloads_have_no_sources(tmp_path: Path) -> None:
    assert digest_sources("resnet") == digest_sources("redline.ladder.workloads:resnet") == {}
    assert digest_sources("no.such.module:f") == {}
    write(tmp_path, typo="def f(:\n")
    assert list(digest_sources(f"{tmp_path / 'typo.py'}:f")) == ["typo.py"]


def test_description_has_a_clause_per_change() -> None:
    assert describe_change({"a": "1"}, {"a": "1"}) == ""
    assert describe_change({"a": "1", "b": "1"}, {"a": "2", "c": "1"}) == "b is gone and c is new and a has changed"
