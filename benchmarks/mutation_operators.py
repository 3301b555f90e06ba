"""Finds the operators of a Python file that the mutation check (mutants.py) replaces, and their replacements.

Skips code that tests cannot or should not check: annotations, strings (f-strings, concatenation), arguments of log
calls, `raise` statements, `if TYPE_CHECKING`, overloads, the boundary of a comparison with a random number, and all
files of Triton kernels. Functions that use `torch.cuda` are mutated only if a CUDA device is present.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

WITH_CUDA = torch.cuda.is_available()
# An operator and its replacements; for inequalities these are the shifted boundary and the negation.
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
    """Returns all mutants of a file."""
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
        # The text between two operands contains only the operator, brackets and comments.
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), source[first:last])
        match = re.search(rb"\s+".join(re.escape(word).encode() for word in old.split()), between)
        assert match, f"{path}:{after[0]}: no {old!r} in {between!r}"
        begin, end = first + match.start(), first + match.end()
        found += [Mutant(path, source.count(b"\n", 0, begin) + 1, begin, end, old, new) for new in replacements]
    return found


def operators_in(node: ast.AST) -> Iterator[tuple[ast.AST, tuple[int, int], tuple[int, int], bool]]:
    """Yields each operator with the positions around it, and whether it compares with a random number."""
    if _is_skipped(node):
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


def _is_skipped(node: ast.AST) -> bool:
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
    """Returns all modules that a file imports; includes names imported from packages, which may be modules."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found
