"""Numbers with limits as types, which msgspec checks when a config is decoded."""

from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
ShareBelowOne = Annotated[float, Meta(ge=0, lt=1)]
