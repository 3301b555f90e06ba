"""Digests of a workload's source files: its own file, and the files that it imports from its own folder or package.

Import statements are parsed, not run, so a module that is imported inside a function counts too. Imports of installed
packages (the standard library, site-packages) and of Redline itself are not followed.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from redline.ladder.workload_prefixes import find_prefix


def digest_sources(address: str) -> dict[str, str]:
    """Returns the digest of each file by its path relative to the import root; empty for a bundled workload."""
    if prefix := find_prefix(address):
        settings = Path(prefix.rest_of(address))
        settings = settings / "config.json" if settings.is_dir() else settings
        return {settings.name: _digest(settings.read_bytes())} if settings.is_file() else {}
    base, waiting = _find(address.rpartition(":")[0])
    # If the workload is in an installed package, only the files of this package count.
    own = base / waiting[0].relative_to(base).parts[0] if waiting and _is_installed(base) else base
    found: dict[str, str] = {}
    while waiting:
        file = waiting.pop()
        name = file.relative_to(base).as_posix()
        if name not in found and file.is_relative_to(own):
            source = file.read_bytes()
            found[name] = _digest(source)
            waiting += _imported(source, file, base)
    return dict(sorted(found.items()))


def describe_change(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns `net.py has changed and layers.py is gone`, for example; empty if nothing changed."""
    clauses = [f"{name} is gone" for name in then if name not in now]
    clauses += [f"{name} is new" for name in now if name not in then]
    clauses += [f"{name} has changed" for name in now if name in then and then[name] != now[name]]
    return " and ".join(clauses)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _find(place: str) -> tuple[Path, list[Path]]:
    """Returns the import root (an entry of `sys.path`), and the files that run when the workload is imported."""
    if place.endswith(".py"):
        file = Path(place).resolve()
        return file.parent, [file]
    names = place.split(".")
    if place and names[0] != "redline":
        for entry in (Path.cwd(), *(Path(entry).resolve() for entry in sys.path)):
            if _file(entry.joinpath(*names)) is not None:
                return entry, _files(entry, names)
    return Path.cwd(), []


def _file(module: Path) -> Path | None:
    return next((f for f in (module / "__init__.py", module.with_name(f"{module.name}.py")) if f.is_file()), None)


def _files(base: Path, names: list[str]) -> list[Path]:
    """Returns the files that run when `names` is imported from this folder: its parent packages and the module."""
    found = [_file(base.joinpath(*names[:count])) for count in range(1, len(names) + 1)]
    return [file for file in found if file is not None]


def _is_installed(base: Path) -> bool:
    return base.name in ("site-packages", "dist-packages") or base == Path(sysconfig.get_path("stdlib")).resolve()


def _imported(source: bytes, file: Path, base: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # importing the workload will raise a better error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [(base, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[min(node.level, len(file.parents)) - 1] if node.level else base
            module = node.module.split(".") if node.module else []
            wanted = [(start, [*module, alias.name]) for alias in node.names]
            wanted += [(start, ["__init__"])] if node.level else []
        else:
            continue
        for start, names in wanted:
            if not (start == base and names[0] == "redline"):
                yield from (found for found in _files(start, names) if found.is_relative_to(base))
