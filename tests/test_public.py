"""The public names: complete, importable, documented; and importing them starts nothing."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import redline

HEAVY = ("torchao", "onnxruntime", "onnx", "openvino", "transformers", "torch_tensorrt", "typer", "rich", "jinja2")


def test_all_lists_every_public_name() -> None:
    assert all(hasattr(redline, name) for name in redline.__all__)
    names = {name for name, value in vars(redline).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert sorted(names | {"__version__"}) == redline.__all__ and set(redline.__all__) <= set(dir(redline))
    assert sorted([*redline._PLACES, "__version__"]) == redline.__all__
    with pytest.raises(AttributeError, match="no attribute 'Warp'"):
        redline.Warp  # noqa: B018


def test_a_star_import_gives_them_all() -> None:
    space: dict[str, object] = {}
    exec("from redline import *", space)
    assert set(redline.__all__) <= set(space)


@pytest.mark.parametrize("name", [name for name in redline.__all__ if name != "__version__"])
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = getattr(redline, name)
    assert value.__module__.startswith("redline.")
    # A dataclass without a docstring shows its signature instead.
    doc = inspect.getdoc(value) or ""
    assert doc and not doc.startswith(f"{name}("), name


# The examples of these run in the tests of their modules.
_ELSEWHERE = {
    "TextGenerator",
    "Upscaler",
    "doctor",
    "evaluate_drift",
    "evaluate_memory",
    "evaluate_super_resolution",
    "report",
    "train",
}


@pytest.mark.parametrize("name", [name for name in redline.__all__ if name not in {"__version__", *_ELSEWHERE}])
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    value = getattr(redline, name)
    monkeypatch.chdir(tmp_path)  # examples write files
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=False).find(value, name, globs={"redline": redline, "torch": torch}):
        assert runner.run(test).failed == 0


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert redline.__version__ == version("redline")


def test_importing_starts_nothing_and_loads_no_engine(tmp_path: Path) -> None:
    code = f"""
import sys
import redline
assert "torch" not in sys.modules
redline.Plan, redline.find_optimal_batch_size, redline.optimize, redline.climb, redline.verify, redline.bench
import torch
assert not torch.cuda.is_initialized()
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
import threading
assert threading.active_count() == 1
"""
    seen = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (seen.returncode, seen.stdout, seen.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
