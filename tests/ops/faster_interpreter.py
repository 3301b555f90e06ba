"""Makes Triton's interpreter faster, without changing what it computes.

The interpreter replaces the functions of `triton.language` when a kernel is launched, and again at each call of a
device function, which takes a quarter of the time of a launch. Here it replaces them once per launch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest


def patch_language_once_per_launch(patch: pytest.MonkeyPatch) -> None:
    """Does nothing for a version of Triton whose interpreter works in another way."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return
    replace: Callable[[Any], Any] = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    replaced: set[tuple[bool, ...]] = set()

    @cache
    def languages_of(function: Any) -> tuple[bool, ...]:
        return tuple(any(value is one for value in function.__globals__.values()) for one in languages)

    def replace_once(function: Any) -> Any:
        key = languages_of(function)
        if key in replaced:
            return interpreter._LangPatchScope()
        scope = replace(function)
        if not replaced:
            # This is the launch of a kernel, which restores the functions at its end.
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())[1]
        replaced.add(key)
        return scope

    patch.setattr(interpreter, "_patch_lang", replace_once)
