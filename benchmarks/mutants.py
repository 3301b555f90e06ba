"""Checks the tests by mutation: changes one operator at a time and counts the changes that a test notices.

    python benchmarks/mutants.py --seed 7 --count 25 [src/redline/stream ...]

Chooses `count` random places in the named files (all of src/redline by default) and changes each one in a copy of the
repository, never in the working tree. Each mutant runs against the mirrored test file (tests/a/test_b.py for
src/redline/a/b.py) and the test files that are nearest to the module in the import graph, four files in all.

found      a test failed
hung       a test ran into its timeout; counts as found
survived   every test passed, or none had failed when the time limit of one mutant was reached
skipped    the test that failed also fails without the mutant, or there is no test to run; not counted

The last line is JSON.
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
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from mutation_operators import WITH_CUDA, Mutant, imported_by, mutants_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path("src/redline")
MOST_TEST_FILES = 4
# These take minutes and run only for the module that they mirror.
LONG_TESTS = {
    "tests/ladder/search/test_climb.py",
    "tests/ladder/search/test_overhead.py",
    "tests/cli/test_climb.py",
    "tests/docs/test_snippets.py",
}


class TestFiles:
    """Selects the test files that a module is run against."""

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
        """Returns the mirrored file, then files that import the module directly, then others, nearest folders first."""
        folder, name = os.path.split(os.path.relpath(path, SOURCES))
        if name == "__init__.py":
            folder, name = os.path.split(folder)
        folder = os.path.join("tests", folder)
        mirrored = os.path.join(folder, f"test_{name.removesuffix('.py')}.py")
        distances: dict[str, int] = {}
        seen, nearest = set(), {_module(path)}
        while nearest:
            for test in (test for test, names in self.imports.items() if names & nearest):
                distances.setdefault(test, len(seen))
            seen |= nearest
            nearest = {name for module in nearest for name in self.importers.get(module, ())} - seen

        def order(test: str) -> tuple[object, ...]:
            away = len(os.path.relpath(test, folder).split("/"))
            # Prefers test files with few imports, which are more specific.
            return test != mirrored, distances[test] > 0, away, distances[test], self._breadth(test), test

        if mirrored in self.imports:
            distances.setdefault(mirrored, 0)
        return sorted(distances.keys() - LONG_TESTS | {mirrored} & distances.keys(), key=order)[:MOST_TEST_FILES]

    def _breadth(self, test: str) -> int:
        return sum(name.startswith("redline.") for name in self.imports[test])


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
        if code == pytest.ExitCode.OK:
            return "survived", ""
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "skipped", "no test in the test files"
        if "from pytest-timeout" in output:
            return "hung", next(iter(failures(output)), "")
        # A mutant may kill pytest by a signal. A wrong pytest option ends it without a failed test.
        failed = next(iter(failures(output)), "")
        if not failed and code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            sys.exit(f"pytest could not run {' '.join(tests)}:\n{output[-2000:]}")
        return "found", failed or f"pytest ended with code {code}"

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
            # The process group has the id of the child and contains all processes that the tests left running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    def _become_pytest(self, written: Path, arguments: Sequence[str]) -> NoReturn:  # pyrefly: ignore[bad-return]
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self.root)
            with open(os.devnull) as nothing, written.open("w") as file:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            # Tests write into the home folder only. No bytecode, because that of a mutant could be reused for its file.
            os.environ |= {"HOME": str(self.home), "TMPDIR": str(self.home), "OMP_NUM_THREADS": "1"}
            os.environ |= {"PYTHONPATH": str(self.root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            # Without this script's folder, whose modules could shadow others of the same name.
            sys.path[:] = [str(self.root / "src"), *(path for path in sys.path if Path(path) != Path(__file__).parent)]
            code = int(pytest.main([*self.options, *arguments]))
        finally:  # the type checker does not see that this never returns
            sys.stdout.flush()
            os._exit(code)


def failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+::\w+\[.*?\](?= - |$)|\S+)", output, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts how many changed operators the tests notice.")
    parser.add_argument("paths", nargs="*", default=[str(SOURCES)], help="files or folders to mutate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=25, help="number of mutants")
    parser.add_argument("--timeout", type=int, default=60, help="time limit of one test in seconds")
    parser.add_argument("--limit", type=int, default=300, help="time limit of all tests of one mutant in seconds")
    given = parser.parse_args()

    # Exits as on Ctrl-C, so that the running tests are killed and the copy is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
        checked = copy.run(noticed_by) if (noticed_by := [test for test in noticed_by if "::" in test]) else (0, "")
        if checked[0] is None:
            print(f"the tests that failed were not run again: they take more than {given.limit} s", flush=True)
        unreliable = set(failures(checked[1]))
    for number, (mutant, _, test) in enumerate(results):
        if test in unreliable:
            results[number] = mutant, "skipped", test
            print(f"skipped: {mutant}: {test} fails without the mutant")

    counts = {
        name: sum(result == name for _, result, _ in results) for name in ("found", "hung", "survived", "skipped")
    }
    score = (counts["found"] + counts["hung"]) / max(1, len(results) - counts["skipped"])
    survivors = sorted(str(mutant) for mutant, result, _ in results if result == "survived")
    print("", "survivors:", *(survivors or ["none"]), sep="\n  ")
    print("", "".join(f"{name:>10}" for name in (*counts, "score")), sep="\n")
    print("".join(f"{count:>10}" for count in counts.values()) + f"{score:>10.0%}")
    print(json.dumps({"seed": given.seed, **counts, "score": score, "survivors": survivors}))


if __name__ == "__main__":
    main()
