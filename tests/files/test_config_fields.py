"""Configs name the field, its value and what is allowed, whether they are constructed or decoded."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from redline.errors import ModelError
from redline.files.config_fields import check_fields, decode
from redline.files.limits import PositiveInt


@dataclass(frozen=True)
class Inner:
    value: int = 0


@dataclass(frozen=True)
class Config:
    width: Annotated[int, Meta(ge=8, multiple_of=8)]
    kind: Literal["one", "two"] = "one"
    sizes: Annotated[tuple[PositiveInt, ...], Meta(min_length=2)] = (1, 2)
    rate: float = 1.0
    inner: Inner | None = None

    def __post_init__(self) -> None:
        check_fields(self, ModelError)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"width": 12}, "width = 12{} must be a whole number (at least 8 and a multiple of 8)."),
        ({"width": 8, "kind": "tow"}, "kind = 'tow'{} must be one of one, two (did you mean two?)."),
        ({"width": 8, "rate": float("inf")}, "rate = inf{} is not a finite 64-bit number."),
        ({"width": True}, "width = True{} must be a whole number (at least 8 and a multiple of 8)."),
        (
            {"width": 8, "sizes": (1,)},
            "sizes = (1,){} must be a list of at least 2 items, each a whole number (at least 1).",
        ),
    ],
)
def test_both_ways_give_the_same_sentence(values: dict[str, Any], sentence: str) -> None:
    for make, where in ((lambda: Config(**values), ""), (lambda: decode(Config, values, "here", ModelError), " here")):
        with pytest.raises(ModelError) as error:
            make()
        assert str(error.value).startswith(sentence.format(where))


def test_missing_and_unknown_fields_are_named() -> None:
    with pytest.raises(ModelError, match=r"^'width' is missing here\.$"):
        decode(Config, {"kind": "two"}, "here", ModelError)
    with pytest.raises(ModelError, match=r"^'kind' is missing here\.$"):
        decode(Config, {"width": 8}, "here", ModelError, complete=True)
    with pytest.raises(ModelError, match=r"^unknown key 'widht' here \(did you mean width\?\)\.$"):
        decode(Config, {"widht": 8}, "here", ModelError)


def test_tables_inside_are_left_alone() -> None:
    assert Config(8, inner=Inner(3)).inner == Inner(3)
    assert decode(Config, {"width": 16, "sizes": [3, 4]}, "here") == Config(16, sizes=(3, 4))
