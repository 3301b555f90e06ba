"""Checks the tests by mutation: changes one operator at a time and counts the changes that a test notices.

    python benchmarks/mutants.py --seed 7 --count 25 [src/redline/stream ...]

Chooses `count` random places in the named files (all of src/redline by default) and changes each one in a copy of the
repository, never in the working tree. Each mutant runs against the mirrored test file (tests/a/test_b.py for
src/redline/a/b.py) and the test files that are nearest to the module in the import graph, three files in all.

found      a test failed
hung       a test ran into its timeout; counts as found
survived   every test passed, or none had failed when the time limit of one mutant was reached
skipped    the test that failed also fails without the mutant, or there is no test to run; not counted

Not mutated, because no test can or should notice: annotations, texts (f-strings, string sums), arguments of log calls,
`raise` statements, `if TYPE_CHECKING`, overloads, the boundary of a comparison with a random number, and all files of
Triton kernels. Functions that use `torch.cuda` are mutated only where a CUDA device is present. The last line is JSON.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path("src/redline")
MOST_TEST_FILES = 3
# These run for minutes, and only for the module that they mirror.
LONG_TESTS = {f"tests/{name}.py" for name in ("test_climb", "cli/test_climb", "docs/test_snippets")}
WITH_CUDA = torch.cuda.is_available()
# An operator as it is written, then its mutants: of an inequality the moved boundary, and the opposite.
MUTATIONS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Not: ("not", ""),
}
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "print", "warn", "fail", "say", "log"}


@dataclass(frozen=True)
class Mutant:
    """`begin` and `end` are the byte offsets of the operator in its file."""

    path: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.old} → {self.new or '(removed)'}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of one file."""
    tree = ast.parse(source)
    if "triton" in path or any(name.split(".")[0] == "triton" for name in imported_by(tree)):
        return []
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for operator, after, before, is_random in operators_in(tree):
        old, *replacements = MUTATIONS[type(operator)]
        if is_random:
            replacements = replacements[-1:]
        first, last = (starts[line - 1] + column for line, column in (after, before))
        # Between two operands there is nothing but the operator, brackets and comments.
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), source[first:last])
        match = re.search(rb"\s+".join(re.escape(word).encode() for word in old.split()), between)
        assert match, f"{path}:{after[0]}: no {old!r} in {between!r}"
        begin, end = first + match.start(), first + match.end()
        found += [Mutant(path, source.count(b"\n", 0, begin) + 1, begin, end, old, new) for new in replacements]
    return found


def operators_in(node: ast.AST) -> Iterator[tuple[ast.AST, tuple[int, int], tuple[int, int], bool]]:
    """Each operator, the two positions between which it is written, and whether it compares with a random number."""
    if _is_left_out(node):
        return
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in MUTATIONS and not (
            _is_text(left) or _is_text(right)
        ):
            yield operator, _end(left), _begin(right), False
        case ast.BoolOp(operator, values):
            for left, right in zip(values, values[1:], strict=False):
                yield operator, _end(left), _begin(right), False
        case ast.Compare(first, operators, others):
            for operator, left, right in zip(operators, [first, *others], others, strict=False):
                yield operator, _end(left), _begin(right), "rand" in ast.unparse(left)
        case ast.UnaryOp(ast.Not() as operator, operand):
            yield operator, _begin(node), _begin(operand), False
        case _:
            pass
    for name, field in ast.iter_fields(node):
        for part in field if isinstance(field, list) else [field]:
            if isinstance(part, ast.AST) and name not in ("annotation", "returns"):
                yield from operators_in(part)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.JoinedStr():
            return True
        case ast.If(ast.Name("TYPE_CHECKING")) | ast.If(ast.Compare(ast.Name("__name__"))):
            return True
        case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(attr=name)):
            return name in LOG_CALLS
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            text = ast.unparse(node)
            return "@overload" in text or ("torch.cuda." in text and not WITH_CUDA)
    return False


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _begin(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def imported_by(tree: ast.AST) -> set[str]:
    """Every module that is imported anywhere in a file; a name imported from a package may be a module too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


class TestFiles:
    """Which test files a module is run against."""

    def __init__(self, root: Path) -> None:
        def parsed(pattern: str) -> dict[str, set[str]]:
            files = {str(path.relative_to(root)): path for path in root.glob(pattern)}
            return {name: imported_by(ast.parse(path.read_bytes())) for name, path in files.items()}

        self.imports = parsed("tests/**/test_*.py")
        if not WITH_CUDA:
            for test in [test for test in self.imports if re.search("gpu|triton|compiles", os.path.basename(test))]:
                del self.imports[test]
        self.importers: dict[str, set[str]] = {}
        for path, names in parsed(f"{SOURCES}/**/*.py").items():
            for name in names:
                self.importers.setdefault(name, set()).add(_module(path))

    def of(self, path: str) -> list[str]:
        """The mirrored file first, then by distance in the import graph, then by distance in the folder tree."""
        folder, name = os.path.split(os.path.relpath(path, SOURCES))
        if name == "__init__.py":
            folder, name = os.path.split(folder)
        folder = os.path.join("tests", folder)
        mirrored = os.path.join(folder, f"test_{name.removesuffix('.py')}.py")
        chosen = [mirrored] if mirrored in self.imports else []
        seen, nearest = set(), {_module(path)}
        while nearest and len(chosen) < MOST_TEST_FILES:
            found = {test for test, names in self.imports.items() if names & nearest} - LONG_TESTS - set(chosen)
            chosen += sorted(found, key=lambda test: (len(os.path.relpath(test, folder).split("/")), test))
            seen |= nearest
            nearest = {name for module in nearest for name in self.importers.get(module, ())} - seen
        return chosen[:MOST_TEST_FILES]


def _module(path: str) -> str:
    return os.path.relpath(path, "src").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Copy:
    """A copy of the repository in which mutants are tried."""

    def __init__(self, folder: Path, timeout_s: int, limit_s: int) -> None:
        self.root, self.home, self.limit_s = folder / "copy", folder / "home", limit_s
        self.home.mkdir()
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "redline-out"))
        marked = "not slow" + ("" if WITH_CUDA else " and not gpu")
        self.options = ["-rfE", "--tb=no", "-p", "no:cacheprovider", f"--timeout={timeout_s}", "-m", marked]

    def try_mutant(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str]:
        """Returns the result, and the test that failed or why there is no result."""
        if not tests:
            return "skipped", "no test file"
        path = self.root / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.apply(source))
        try:
            code, output = self.run(["-x", *tests])
        finally:
            path.write_bytes(source)
        if code is None:
            return "survived", f"not finished after {self.limit_s} s"
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ("survived", "") if code == pytest.ExitCode.OK else ("skipped", "no test in the test files")
        return "hung" if "from pytest-timeout" in output else "found", next(iter(failures(output)), "")

    def run(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        """Runs pytest in a fork of this process, which saves the import of torch; returns its exit code and output."""
        written = self.home / "output.txt"
        child = os.fork()
        if child == 0:
            self._become_pytest(written, arguments)
        try:
            until_s = time.monotonic() + self.limit_s
            while time.monotonic() < until_s:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status), written.read_text(errors="replace")
                time.sleep(0.05)
            return None, ""
        finally:
            # The group has the id of its first process, and holds whatever the tests left running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    def _become_pytest(self, written: Path, arguments: Sequence[str]) -> NoReturn:
        code = 1
        try:
            os.setsid()
            os.chdir(self.root)
            with open(os.devnull) as nothing, written.open("w") as file:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            # Tests write into the home folder only. Bytecode of a mutant would later be taken for that of its file.
            os.environ |= {"HOME": str(self.home), "TMPDIR": str(self.home), "OMP_NUM_THREADS": "1"}
            os.environ |= {"PYTHONPATH": str(self.root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            # Without the folder of this script, whose files have names that tests import from elsewhere.
            sys.path[:] = [str(self.root / "src"), *(path for path in sys.path if Path(path) != Path(__file__).parent)]
            code = int(pytest.main([*self.options, *arguments]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+::\w+\[.*?\](?= - |$)|\S+)", output, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts how many changed operators the tests notice.")
    parser.add_argument("paths", nargs="*", default=[str(SOURCES)], help="files or folders to mutate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=25, help="how many mutants to try")
    parser.add_argument("--timeout", type=int, default=60, help="seconds that one test may take")
    parser.add_argument("--limit", type=int, default=180, help="seconds that the tests of one mutant may take")
    given = parser.parse_args()

    os.chdir(ROOT)
    files = sorted({f for path in map(Path, given.paths) for f in ([path] if path.is_file() else path.rglob("*.py"))})
    everything = [mutant for file in files for mutant in mutants_of(str(file), file.read_bytes())]
    chosen = random.Random(given.seed).sample(everything, min(given.count, len(everything)))
    print(f"{len(chosen)} of {len(everything):,} mutants in {len(files)} files, seed {given.seed}", flush=True)
    test_files = TestFiles(ROOT)
    results: list[tuple[Mutant, str, str]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder), given.timeout, given.limit)
        for number, mutant in enumerate(chosen, 1):
            began_s = time.monotonic()
            result, detail = copy.try_mutant(mutant, test_files.of(mutant.path))
            results.append((mutant, result, detail))
            seconds = time.monotonic() - began_s
            print(f"{number:4}/{len(chosen)}  {result:8}  {seconds:5.1f} s  {mutant}  {detail}", flush=True)
        noticed_by = sorted({detail for _, result, detail in results if result in ("found", "hung") and detail})
        unreliable = set(failures(copy.run(noticed_by)[1])) if noticed_by else set()
    for number, (mutant, _, test) in enumerate(results):
        if test in unreliable:
            results[number] = mutant, "skipped", test
            print(f"skipped: {mutant}: {test} fails without the mutant")

    counts = {
        name: sum(result == name for _, result, _ in results) for name in ("found", "hung", "survived", "skipped")
    }
    score = (counts["found"] + counts["hung"]) / max(1, len(results) - counts["skipped"])
    survivors = sorted(str(mutant) for mutant, result, _ in results if result == "survived")
    print("", "survivors:", *survivors, sep="\n  ")
    print("", "".join(f"{name:>10}" for name in (*counts, "score")), sep="\n")
    print("".join(f"{count:>10}" for count in counts.values()) + f"{score:>10.0%}")
    print(json.dumps({"seed": given.seed, **counts, "score": score, "survivors": survivors}))


if __name__ == "__main__":
    main()
