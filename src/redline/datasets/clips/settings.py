"""The settings of synthetic clips: photos, camera motion and degradation."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from redline.errors import RedlineError
from redline.files.limits import NonNegativeFloat, PositiveInt, Share, ShareBelowOne


@dataclass(frozen=True)
class ClipSettings:
    """`world_px` is the side of the photo crop that the camera moves over, `frame_px` the side of a frame.

    `pan_px` (pixels per frame), `zoom` (ratio) and `turn` (radians) are the maximum motions. `still`, `objects` and
    `cuts` are the fractions of clips with a still camera, a moving object and a cut. `noise` (standard deviation in
    good light), `blur_px` (standard deviation), `dark` (fraction of light that is lost; gain restores most of it) and
    `cast` (change of each color channel) are the maximum degradations. `quality` is the minimum JPEG quality.
    """

    photos: str = ""
    validation: tuple[str, ...] = ()
    shrink: tuple[Annotated[float, Meta(ge=1)], ...] = (1,)
    frame_px: Annotated[int, Meta(ge=8)] = 256
    world_px: PositiveInt = 512
    batch: PositiveInt = 16
    pan_px: NonNegativeFloat = 6.0
    zoom: NonNegativeFloat = 0.2
    turn: NonNegativeFloat = 0.25
    still: Share = 0.4
    objects: Share = 0.4
    cuts: Share = 0.1
    noise: NonNegativeFloat = 0.1
    blur_px: NonNegativeFloat = 1.2
    # The limit is below 1, because a black image cannot be restored.
    dark: ShareBelowOne = 0.5
    cast: ShareBelowOne = 0.1
    quality: Annotated[int, Meta(ge=1, le=100)] = 20

    def __post_init__(self) -> None:
        if not self.photos:
            raise RedlineError("no training data: set photos to a folder under [data], or pass --photos.")
        if self.world_px < self.frame_px:
            raise RedlineError(f"world_px = {self.world_px} must be at least frame_px = {self.frame_px}.")
