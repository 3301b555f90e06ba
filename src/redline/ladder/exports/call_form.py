"""Describes the inputs and outputs of a model as JSON, so that another process can check a call and rebuild an output.

A form repeats the nesting of the values. Its leaves are `{"tensor": [4, 3, 128, 128], "dtype": "float32"}` and
`{"value": 0.5}`; its nodes are `{"tuple": […]}`, `{"list": […]}` and `{"dict": {name: …}}`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from redline.errors import ModelError

Form = Mapping[str, Any]
_CONSTANTS = (bool, int, float, str, type(None))


def describe(value: Any, what: str, strict: bool = True) -> Form:
    """Returns the form of a value; raises ModelError for an object that JSON cannot describe.

    If not `strict`, such an object becomes `{"object": class}`, which can be read but not rebuilt.
    """
    if isinstance(value, Tensor):
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, _CONSTANTS):
        return {"value": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [describe(item, what, strict) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(item, what, strict) for key, item in value.items()}}
    if not strict:
        return {"object": type(value).__name__}
    raise ModelError(
        f"the {what} contains a {type(value).__name__}, and this form stores only tensors, numbers and text in tuples, "
        "lists and dicts: export to a folder, or wrap the model in the workload's build()."
    )


def describe_call(args: Sequence[Any], kwargs: Mapping[str, Any], strict: bool = True) -> Form:
    named = dict(sorted(kwargs.items()))
    return {"args": describe(list(args), "input", strict), "kwargs": describe(named, "input", strict)}


def tensors_of_call(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors of a call in the order of the form; raises ModelError if the call has another form."""
    return [*_tensors(form["args"], list(args), "args"), *_tensors(form["kwargs"], dict(kwargs), "kwargs")]


def _tensors(form: Form, value: Any, place: str) -> Iterator[Tensor]:
    if "tensor" in form:
        if not isinstance(value, Tensor):
            raise ModelError(f"{place} is {_kind(value)}, but the artifact takes a tensor there.")
        seen = describe(value, "input")
        if seen != {"tensor": list(form["tensor"]), "dtype": form["dtype"]}:
            raise ModelError(
                f"{place} is {_tensor_text(seen)}, but the artifact takes {_tensor_text(form)}: export it again for "
                "this shape and dtype."
            )
        yield value
    elif "value" in form:
        if isinstance(value, Tensor) or value != form["value"]:
            raise ModelError(f"{place} is {_kind(value)}, but {form['value']!r} is fixed in the artifact.")
    elif "dict" in form:
        parts = form["dict"]
        if not isinstance(value, dict) or value.keys() != parts.keys():
            given = ", ".join(map(str, value)) if isinstance(value, dict) else _kind(value)
            raise ModelError(f"{place}: the artifact takes the names {_names(parts)}, not {given or 'none'}.")
        for key, part in parts.items():
            yield from _tensors(part, value[key], key if place == "kwargs" else f"{place}[{key!r}]")
    else:
        parts = form.get("tuple", form.get("list", ()))
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            given = f"{len(value)}" if isinstance(value, (tuple, list)) else _kind(value)
            raise ModelError(f"{place}: the artifact takes {len(parts)} values, not {given}.")
        for index, part in enumerate(parts):
            yield from _tensors(part, value[index], f"{place}[{index}]")


def restore(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Returns the output: the tensors, and the constants of the form, in the nesting of the form."""
    return _restored(form, iter(tensors))


def _restored(form: Form, tensors: Iterator[Tensor]) -> Any:
    if "tensor" in form:
        return next(tensors)
    if "value" in form:
        return form["value"]
    if "dict" in form:
        return {key: _restored(part, tensors) for key, part in form["dict"].items()}
    parts = [_restored(part, tensors) for part in form.get("tuple", form.get("list", ()))]
    return tuple(parts) if "tuple" in form else parts


def tensor_forms(form: Form) -> list[Form]:
    """Returns the leaves of the form that are tensors, in order."""
    if "tensor" in form:
        return [form]
    parts = form["dict"].values() if "dict" in form else form.get("tuple", form.get("list", ()))
    return [leaf for part in parts for leaf in tensor_forms(part)]


def _tensor_text(form: Form) -> str:
    return f"a tensor of shape {tuple(form['tensor'])} in {form['dtype']}"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _names(parts: Mapping[str, Any]) -> str:
    return ", ".join(parts) or "none"
