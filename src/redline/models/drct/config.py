"""The hyper-parameters of a DRCT model, all of which follow from the shapes of its weights."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from redline.errors import ModelError
from redline.files.config_fields import check_fields

BLOCKS_PER_GROUP = 5
# The published models have up to 12 groups and windows of 16; much larger values come from damaged or malicious files.
_MOST_GROUPS, _LARGEST_WINDOW = 64, 64


@dataclass(frozen=True)
class DrctConfig:
    """The defaults are those of DRCT; DRCT-L has 12 groups. Attention windows have `window` × `window` tokens."""

    scale: int = 4
    groups: Annotated[int, Meta(ge=1, le=_MOST_GROUPS)] = 6
    width: int = 180
    growth: int = 32
    features: int = 64
    window: Annotated[int, Meta(ge=1, le=_LARGEST_WINDOW)] = 16
    heads: tuple[int, ...] = (6, 4, 2, 6, 4)
    mlp_widths: tuple[int, ...] = (360, 424, 488, 276, 308)

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        if self.scale not in (2, 3, 4, 8):
            raise ModelError(f"scale = {self.scale} must be one of 2, 3, 4, 8.")
        if len(self.heads) != BLOCKS_PER_GROUP or len(self.mlp_widths) != BLOCKS_PER_GROUP:
            raise ModelError(f"DRCT's heads and mlp_widths must have {BLOCKS_PER_GROUP} entries, one for each block.")
        for width, heads in zip(self.block_widths, self.heads, strict=True):
            if heads < 1 or width % heads:
                raise ModelError(f"a DRCT block of width {width} cannot have {heads} heads.")

    @classmethod
    def of(cls, scale: int = 4, groups: int = 6, width: int = 180, growth: int = 32, **others: int) -> "DrctConfig":
        """Sets heads and MLP widths by the paper's rule.

        If the number of heads by this rule does not divide a block's width, the largest divisor up to 6 is used.
        """
        widths = [width + growth * i for i in range(BLOCKS_PER_GROUP)]
        heads = tuple(6 - w % 6 if w % (6 - w % 6) == 0 else max(h for h in range(1, 7) if w % h == 0) for w in widths)
        mlp_widths = tuple(w * (2 if i < 3 else 1) for i, w in enumerate(widths))
        return cls(scale, groups, width, growth, heads=heads, mlp_widths=mlp_widths, **others)

    @property
    def block_widths(self) -> tuple[int, ...]:
        return tuple(self.width + self.growth * index for index in range(BLOCKS_PER_GROUP))

    @property
    def upsampling(self) -> tuple[int, ...]:
        """The factors of the upsampling steps: one factor of 3 for scale 3, otherwise factors of 2."""
        return (3,) if self.scale == 3 else (2,) * (self.scale.bit_length() - 1)

    def __str__(self) -> str:
        known = {6: "DRCT", 12: "DRCT-L"}
        usual = DrctConfig.of(self.scale, self.groups) == self
        of_groups = f"DRCT of {self.groups} group{'s' if self.groups > 1 else ''}"
        name = known.get(self.groups, of_groups) if usual else of_groups
        return f"{name} ×{self.scale}" + ("" if usual else f", width {self.width}")
