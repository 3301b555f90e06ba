"""The mutation check: which operators it changes, how, and which tests it runs."""

import ast
from pathlib import Path

import pytest

from benchmark_scripts import load_script

ROOT = Path(__file__).parents[2]


mutants = load_script("mutants")


def changed(source: str) -> list[str]:
    """Every mutant's text."""
    return [mutant.apply(source.encode()).decode() for mutant in mutants.mutants_of("a.py", source.encode())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a + b", ["a - b"]),
        ("a ** b", ["a * b"]),
        ("a < b", ["a <= b", "a >= b"]),
        ("a < b == c", ["a <= b == c", "a >= b == c", "a < b != c"]),
        ("rand(3) < b", ["rand(3) >= b"]),
        ("a is  not b", ["a is b"]),
        ("a and b and c", ["a or b and c", "a and b or c"]),
        ("x = not a", ["x =  a"]),
        ("(a) * (b)", ["(a) / (b)"]),
        ("('é', a + b)", ["('é', a - b)"]),
        ("x = (\n    a  # + is meant\n    + b\n)", ["x = (\n    a  # + is meant\n    - b\n)"]),
    ],
)
def test_an_operator_is_changed_where_it_stands(source: str, expected: list[str]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: int | None, b: 1 + 1) -> 1 + 1: ...",
        "x: 1 + 1",
        "f'{a + b}'",
        "'a' + b",
        "raise ValueError(a + b)",
        "log.warning(a + b)",
        "if TYPE_CHECKING:\n    a = b + c",
        "if __name__ == '__main__':\n    a = b + c",
        "@overload\ndef f(a=1 + 1): ...",
        "import triton\na = b + c",
    ],
)
def test_what_no_test_could_notice_is_left_alone(source: str) -> None:
    assert changed(source) == []


def test_every_mutant_of_a_real_file_can_be_read() -> None:
    path = ROOT / "src/redline/upscale/tiling.py"
    source = path.read_bytes()
    found = mutants.mutants_of(str(path), source)
    assert len(found) > 30
    for mutant in found:
        ast.parse(mutant.apply(source))
        assert mutant.old in source.decode().splitlines()[mutant.line - 1]


def test_a_module_runs_against_its_mirrored_test_and_the_nearest_others(tmp_path: Path) -> None:
    files = {
        "src/redline/near/part.py": "",
        "src/redline/near/whole.py": "from redline.near import part",
        "tests/near/test_part.py": "",
        "tests/near/test_gpu.py": "import redline.near.part",
        "tests/far/test_direct.py": "from redline.near.part import f",
        "tests/near/test_whole.py": "from redline.near.whole import g",
        "tests/far/test_unrelated.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tests = mutants.TestFiles(tmp_path)
    nearest = ["tests/far/test_direct.py", "tests/near/test_whole.py"]
    assert tests.of("src/redline/near/part.py") == ["tests/near/test_part.py", *nearest]
    assert tests.of("src/redline/near/whole.py") == ["tests/near/test_whole.py"]


def test_the_failed_test_is_read_from_pytests_summary() -> None:
    output = "F\nFAILED tests/a.py::test_b[x - y] - assert 1\nERROR tests/c.py\nFAILED tests/d.py::test_e - a[0] - b\n"
    assert mutants.failures(output) == ["tests/a.py::test_b[x - y]", "tests/c.py", "tests/d.py::test_e"]
