"""What an LSD is made of, and the four sizes that have a name."""

import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from redline.errors import ModelError

PICTURE_CHANNELS = 3
# What goes in side by side: the noisy picture, the frame, and the previous output.
PICTURES_IN = 3
# What the frame is blended with, by a weight for every pixel: itself a little and very soft, and the previous output.
PICTURES_BLENDED = 3
# Tensor cores take channels by eights; what is fewer is filled up with zeros.
EIGHT = 8


@dataclass(frozen=True)
class LsdConfig:
    """`patch` pixels a side become channels at the start; each further level has half the side of the one before.

    `blocks` run at each level on the way down and as many on the way up; the smallest `attending` levels attend.
    `control` is the length of the control vector; 0 is a model without one.
    """

    patch: int = 2
    width: int = 16
    multipliers: tuple[int, ...] = (1, 2, 4, 8)
    blocks: int = 1
    attending: int = 1
    control: int = 8

    def __post_init__(self) -> None:
        if self.patch not in (1, 2, 4, 8):
            raise ModelError(f"an LSD's patch is 1, 2, 4 or 8 pixels a side, not {self.patch}.")
        if self.width < EIGHT or self.width % EIGHT:
            raise ModelError(f"an LSD's width is a multiple of 8, not {self.width}.")
        if len(self.multipliers) < 2 or min(self.multipliers) < 1:
            raise ModelError(f"an LSD has two levels or more, each at least as wide as 1, not {self.multipliers}.")
        if self.blocks < 1:
            raise ModelError(f"an LSD has at least one block a level, not {self.blocks}.")
        if not 0 <= self.attending <= len(self.multipliers):
            raise ModelError(f"{self.attending} of {len(self.multipliers)} levels cannot attend.")
        if self.control < 0 or self.control % EIGHT:
            raise ModelError(f"an LSD's control vector has a multiple of 8 entries, or none, not {self.control}.")

    @classmethod
    def of(cls, size: str) -> "LsdConfig":
        if size not in SIZES:
            raise ModelError(f"there is no LSD of size {size!r}: there are {', '.join(SIZES)}.")
        return SIZES[size]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "the config") -> "LsdConfig":
        """What `to_dict` gave; a name or kind of value that is not known is refused."""
        hints = typing.get_type_hints(cls)
        if set(values) != {field.name for field in fields(cls)}:
            raise ModelError(f"{origin!r} does not describe an LSD of this version: its settings have other names.")
        for name, value in values.items():
            items = value if hints[name] is not int and isinstance(value, (list, tuple)) else [value]
            if any(type(item) is not int for item in items) or (hints[name] is not int and items is not value):
                raise ModelError(f"{origin!r} does not describe an LSD: its {name} is {value!r}.")
        kinds: dict[str, Any] = {name: value if type(value) is int else tuple(value) for name, value in values.items()}
        return cls(**kinds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, the largest picture first."""
        return tuple(self.width * multiplier for multiplier in self.multipliers)

    @property
    def channels_in(self) -> int:
        return _up_to_eights(PICTURES_IN * PICTURE_CHANNELS * self.patch**2)

    @property
    def channels_out(self) -> int:
        return _up_to_eights((PICTURE_CHANNELS + PICTURES_BLENDED) * self.patch**2)

    @property
    def multiple_px(self) -> int:
        """Sides that are multiples of this, twice it or more, need no padding."""
        return self.patch * 2 ** (len(self.multipliers) - 1)

    def padding_px(self, side: int) -> int:
        """How much a side is padded: norms need more than one position at the smallest level."""
        return max(-side % self.multiple_px, 2 * self.multiple_px - side)

    def __str__(self) -> str:
        name = next((name for name, config in SIZES.items() if config == self), f"of width {self.width}")
        return f"LSD {name}"


def _up_to_eights(channels: int) -> int:
    return -(-channels // EIGHT) * EIGHT


SIZES = {
    "tiny": LsdConfig(),
    "light": LsdConfig(patch=2, width=176, multipliers=(1, 2, 4, 8), blocks=1, attending=2),
    "medium": LsdConfig(patch=2, width=344, multipliers=(1, 2, 4, 8), blocks=1, attending=2),
    "heavy": LsdConfig(patch=2, width=512, multipliers=(1, 2, 4, 8), blocks=1, attending=2),
}
