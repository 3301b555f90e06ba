"""Reads the JSON body of a request: first as plain values, then as one of the structs of `api_requests`."""

import logging
import re
from typing import Any, TypeVar

import msgspec

from redline.serving.api_requests import UNSUPPORTED
from redline.serving.errors import ApiError, invalid
from redline.serving.limits import Limits

Read = TypeVar("Read")
log = logging.getLogger("redline.serving")
_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>[^`]*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object missing required field `(?P<name>\w+)`")
# The number of unknown field names that are remembered, so that each name is logged only once. It is limited because
# clients choose the names.
_MOST_NAMES = 100


class BodyReader:
    """Reads request bodies and checks their limits. Ignores unknown fields, with one warning for each name."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reported: set[str] = set()

    def read_object(self, body: bytes) -> dict[str, Any]:
        """Returns the fields of a JSON object that are not null."""
        try:
            values = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"The request body is not valid JSON: {error}.") from error
        except RecursionError as error:
            raise self._too_deep() from error
        if not isinstance(values, dict):
            raise invalid("The request body must be a JSON object.")
        given = {name: value for name, value in values.items() if value is not None}
        self._check_depth(given)
        return given

    def read(self, body: bytes, kind: type[Read]) -> Read:
        """Returns the request as a struct of type `kind`. Raises an ApiError that names the field if one is invalid."""
        given = self.read_object(body)
        for name, feature in UNSUPPORTED.items():
            if given.get(name):
                raise invalid(f"This server does not support {feature}.", name, "unsupported_parameter")
        self._report_unknown(given, kind)
        try:
            return msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            raise _explain(error) from error

    def _check_depth(self, values: dict[str, Any]) -> None:
        """Raises an ApiError if values are nested too deeply. Uses no recursion, which deep nesting could overflow."""
        level: list[Any] = [values]
        for _ in range(self._limits.nesting):
            nested: list[Any] = []
            for value in level:
                items = value.values() if isinstance(value, dict) else value
                nested += [item for item in items if isinstance(item, (dict, list))]
            if not nested:
                return
            level = nested
        raise self._too_deep()

    def _too_deep(self) -> ApiError:
        return invalid(f"The request body is nested more than {self._limits.nesting} levels deep.")

    def _report_unknown(self, given: dict[str, Any], kind: Any) -> None:
        for name in given.keys() - set(kind.__struct_fields__) - self._reported:
            if len(self._reported) < _MOST_NAMES:
                self._reported.add(name)
                log.warning("ignored the unknown field %.80r of a request; further ones are not logged", name)


def _explain(error: msgspec.ValidationError) -> ApiError:
    """Returns the error in OpenAI's form, with the path of the invalid field."""
    found = _PLACE.fullmatch(str(error))
    what, place = (found["what"], found["place"] or "") if found else (str(error), "")
    if missing := _FIELD.match(what):
        place = ".".join(part for part in (place, missing["name"]) if part)
        return invalid(f"The field {place!r} is required.", place)
    return invalid(f"Invalid value for {place or 'the body'!r}: {what.replace('`', '')}.", place or None)
