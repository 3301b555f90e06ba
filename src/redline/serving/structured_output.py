"""Converts the fields for structured output (response_format, structured_outputs, guided_*) to one grammar."""

import json
import re

import msgspec

from redline.generation.request import Grammar
from redline.serving.api_requests import JsonObject, SamplingFields, StructuredOutputs
from redline.serving.errors import invalid
from redline.serving.limits import Limits


def grammar_of(fields: SamplingFields, limits: Limits) -> Grammar | None:
    """Returns the grammar that the text must match, or None. Raises an ApiError if several grammars are given."""
    found: dict[str, Grammar] = {}
    if fields.response_format is not None:
        grammar = _response_format(fields)
        found |= {} if grammar is None else {"response_format": grammar}
    if fields.structured_outputs is not None:
        found["structured_outputs"] = _structured(fields.structured_outputs)
    if fields.guided_json is not None:
        found["guided_json"] = _schema(fields.guided_json, "guided_json")
    if fields.guided_regex is not None:
        found["guided_regex"] = Grammar("regex", fields.guided_regex)
    if fields.guided_grammar is not None:
        found["guided_grammar"] = Grammar("lark", fields.guided_grammar)
    if fields.guided_choice is not None:
        found["guided_choice"] = _choice(fields.guided_choice, "guided_choice")
    if len(found) > 1:
        raise invalid(f"Give only one of {' and '.join(found)}.", next(iter(found)))
    for name, grammar in found.items():
        if len(grammar.text.encode()) > limits.schema_bytes:
            raise invalid(f"{name} is longer than {limits.schema_bytes} bytes.", name)
    return next(iter(found.values()), None)


def _response_format(fields: SamplingFields) -> Grammar | None:
    form = fields.response_format
    assert form is not None
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json")
    if form.json_schema is None or form.json_schema.schema is None:
        raise invalid("response_format of the type json_schema needs json_schema.schema.", "response_format")
    schema = form.json_schema.schema
    return Grammar("json") if schema is True else _schema(schema or {}, "response_format")


def _structured(given: StructuredOutputs) -> Grammar:
    values = {name: value for name in given.__struct_fields__ if (value := getattr(given, name)) not in (None, False)}
    if len(values) != 1:
        names = ", ".join(given.__struct_fields__)
        raise invalid(f"structured_outputs needs exactly one of {names}.", "structured_outputs")
    if given.json is not None:
        return _schema(given.json, "structured_outputs.json")
    if given.regex is not None:
        return Grammar("regex", given.regex)
    if given.grammar is not None:
        return Grammar("lark", given.grammar)
    if given.choice is not None:
        return _choice(given.choice, "structured_outputs.choice")
    return Grammar("json")


def _schema(schema: JsonObject | str, param: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{param} is not a JSON schema: {error}.", param) from error
    if not isinstance(schema, dict):
        raise invalid(f"{param} must be a JSON schema: an object.", param)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def _choice(choices: list[str], param: str) -> Grammar:
    if not choices or not all(choices):
        raise invalid(f"{param} needs at least one text, and none may be empty.", param)
    return Grammar("regex", "|".join(f"(?:{re.escape(choice)})" for choice in choices))
