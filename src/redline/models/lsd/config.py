"""The hyper-parameters of an LSD model, and the four named sizes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from redline.errors import ModelError
from redline.files.config_fields import check_fields, decode
from redline.files.limits import NonNegativeInt, PositiveInt

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

    patch: Literal[1, 2, 4, 8] = 2
    width: Annotated[int, Meta(ge=EIGHT, multiple_of=EIGHT)] = 16
    multipliers: Annotated[tuple[PositiveInt, ...], Meta(min_length=2)] = (1, 2, 4, 8)
    blocks: PositiveInt = 1
    attending: NonNegativeInt = 1
    control: Annotated[int, Meta(ge=0, multiple_of=EIGHT)] = 8

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        if self.attending > len(self.multipliers):
            raise ModelError(
                f"attending = {self.attending} must be at most {len(self.multipliers)}, one per multiplier."
            )

    @classmethod
    def of(cls, size: str) -> "LsdConfig":
        if size not in SIZES:
            raise ModelError(f"unknown LSD size {size!r} (available: {', '.join(SIZES)}).")
        return SIZES[size]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "the config") -> "LsdConfig":
        """Reverses `to_dict`; raises for unknown or missing names and for values of the wrong type."""
        return decode(cls, values, f"in the header of {origin!r}", ModelError, complete=True)

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
        """Returns how many pixels are added to a height or width.

        The padded side is a multiple of `multiple_px`, and at least twice `multiple_px`, because the norms of the
        smallest level need at least two positions.
        """
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
