"""The hyper-parameters of an LSD model, and the four named sizes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from redline.errors import ModelError
from redline.files.untrusted import check_types, field_types

IMAGE_CHANNELS = 3
# The number of input images, which are concatenated: the noisy image, the frame and the previous output.
IMAGES_IN = 3
# The number of images that are blended with the frame: two blurred copies of the frame, and the previous output.
IMAGES_BLENDED = 3
# Inputs and outputs are padded to a multiple of this many channels, which tensor cores need.
EIGHT = 8


@dataclass(frozen=True)
class LsdConfig:
    """The first level works on patches of `patch` × `patch` pixels; each further level halves height and width.

    Encoder and decoder have `blocks` blocks per level; the `attending` smallest levels have self-attention.
    `control` is the length of the control vector, or 0 for a model without one.
    """

    patch: int = 2
    width: int = 16
    multipliers: tuple[int, ...] = (1, 2, 4, 8)
    blocks: int = 1
    attending: int = 1
    control: int = 8

    def __post_init__(self) -> None:
        if self.patch not in (1, 2, 4, 8):
            raise ModelError(f"patch must be 1, 2, 4 or 8, not {self.patch}.")
        if self.width < EIGHT or self.width % EIGHT:
            raise ModelError(f"width must be a multiple of 8, not {self.width}.")
        if len(self.multipliers) < 2 or min(self.multipliers) < 1:
            raise ModelError(f"multipliers must be two or more numbers of at least 1, not {self.multipliers}.")
        if self.blocks < 1:
            raise ModelError(f"blocks must be at least 1, not {self.blocks}.")
        if not 0 <= self.attending <= len(self.multipliers):
            raise ModelError(f"attending must be from 0 to {len(self.multipliers)} (levels), not {self.attending}.")
        if self.control < 0 or self.control % EIGHT:
            raise ModelError(f"control must be a multiple of 8, or 0, not {self.control}.")

    @classmethod
    def of(cls, size: str) -> "LsdConfig":
        if size not in SIZES:
            raise ModelError(f"unknown LSD size {size!r} (available: {', '.join(SIZES)}).")
        return SIZES[size]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "the config") -> "LsdConfig":
        """Reverses `to_dict`; raises for unknown or missing names and for values of the wrong type."""
        types = field_types(cls)
        if set(values) != set(types):
            raise ModelError(
                f"{origin!r} is not the config of an LSD: its settings must be {', '.join(sorted(types))}."
            )
        check_types(values, types, repr(origin), ModelError)
        settings: dict[str, Any] = {**values, "multipliers": tuple(values["multipliers"])}
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of channels of each level, the highest resolution first."""
        return tuple(self.width * multiplier for multiplier in self.multipliers)

    @property
    def channels_in(self) -> int:
        return _round_up(IMAGES_IN * IMAGE_CHANNELS * self.patch**2)

    @property
    def channels_out(self) -> int:
        return _round_up((IMAGE_CHANNELS + IMAGES_BLENDED) * self.patch**2)

    @property
    def multiple_px(self) -> int:
        """Heights and widths need no padding if they are multiples of this number and at least twice this number."""
        return self.patch * 2 ** (len(self.multipliers) - 1)

    def padding_px(self, side: int) -> int:
        """Returns the padding of a height or width; the norms of the smallest level need at least two positions."""
        return max(-side % self.multiple_px, 2 * self.multiple_px - side)

    def __str__(self) -> str:
        name = next((name for name, config in SIZES.items() if config == self), f"of width {self.width}")
        return f"LSD {name}"


def _round_up(channels: int) -> int:
    return -(-channels // EIGHT) * EIGHT


SIZES = {
    "tiny": LsdConfig(),
    "light": LsdConfig(patch=2, width=176, multipliers=(1, 2, 4, 8), blocks=1, attending=2),
    "medium": LsdConfig(patch=2, width=344, multipliers=(1, 2, 4, 8), blocks=1, attending=2),
    "heavy": LsdConfig(patch=2, width=512, multipliers=(1, 2, 4, 8), blocks=1, attending=2),
}
