"""Makes Triton's interpreter faster, without changing what it computes.

Most of its time goes into work that it repeats: it replaces the functions of `triton.language` at each launch and each
call of a device function, builds the same types and shapes for every tensor, and computes checks for integer overflow
whose result it does not read. Here all of this is done once or not at all.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

VERSION = "3.7."


def patch_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Does nothing for a version of Triton whose interpreter may work in another way."""
    if not pytest.importorskip("triton").__version__.startswith(VERSION):
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    _replace_language_once(patch, interpreter)
    _skip_unread_checks(patch, interpreter)
    _reuse_types(patch, interpreter)
    _reuse_shapes(patch, interpreter.tl.core)


def _replace_language_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Keeps the functions of `triton.language` replaced between launches."""
    replace: Callable[[Any], Any] = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    replaced: set[tuple[bool, ...]] = set()
    nothing_to_restore = interpreter._LangPatchScope()

    @cache
    def languages_of(function: Any) -> tuple[bool, ...]:
        return tuple(any(value is one for value in function.__globals__.values()) for one in languages)

    def replace_once(function: Any) -> Any:
        key = languages_of(function)
        if key not in replaced:
            for owner, name, original in replace(function)._changes:
                # Has monkeypatch restore the original at the end.
                current = getattr(owner, name)
                if original is interpreter._MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
                patch.setattr(owner, name, current, raising=False)
            replaced.add(key)
        return nothing_to_restore

    patch.setattr(interpreter, "_patch_lang", replace_once)


def _skip_unread_checks(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Integer overflow is asserted only with `debug`, but computed in int64 also without it."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        patch.setattr(builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))


def _reuse_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    core = interpreter.tl.core
    numpy_type, equal = interpreter._get_np_dtype, core.dtype.__eq__
    numpy_types: dict[str, Any] = {}

    def remembered_numpy_type(triton_type: Any) -> Any:
        name = triton_type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(triton_type)
        return numpy_types[name]

    patch.setattr(interpreter, "_get_np_dtype", remembered_numpy_type)
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    # Interpreted, the types of Triton's language and those of its intermediate representation are the same.
    patch.setattr(core.block_type, "to_ir", lambda self, _: self)


def _reuse_shapes(patch: pytest.MonkeyPatch, core: Any) -> None:
    initialize = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def initialize_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(one.value if type(one) is core.constexpr else one for one in shape)
        if key not in known:
            initialize(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            known[key] = self.shape, self.numel, str(self.shape), sizes, core.constexpr(self.numel)
        self.shape, self.numel, text, self.constexpr_shape, self.constexpr_numel = known[key]
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    no_sizes, one = core.tuple([]), core.constexpr(1)

    def initialize_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        block = type.is_block()
        self.shape, self.numel = (type.constexpr_shape, type.constexpr_numel) if block else (no_sizes, one)

    patch.setattr(core.block_type, "__init__", initialize_block_type)
    patch.setattr(core.tensor, "__init__", initialize_tensor)
