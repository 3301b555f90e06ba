"""The settings of synthetic clips: photos, camera motion and degradation."""

from dataclasses import dataclass

from redline.errors import RedlineError


@dataclass(frozen=True)
class ClipSettings:
    """`world_px` is the side of the photo crop that the camera moves over, `frame_px` the side of a frame.

    `pan_px` (pixels per frame), `zoom` (ratio) and `turn` (radians) are the largest motions. `still`, `objects` and
    `cuts` are the shares of clips with a still camera, a moving object and a cut. `noise` (standard deviation in good
    light), `blur_px` (standard deviation), `dark` (share of light lost, mostly restored by gain) and `cast` (change of
    each color channel) are the strongest degradations, `quality` is the lowest JPEG quality.
    """

    photos: str = ""
    validation: tuple[str, ...] = ()
    shrink: tuple[float, ...] = (1,)
    frame_px: int = 256
    world_px: int = 512
    batch: int = 16
    pan_px: float = 6.0
    zoom: float = 0.2
    turn: float = 0.25
    still: float = 0.4
    objects: float = 0.4
    cuts: float = 0.1
    noise: float = 0.1
    blur_px: float = 1.2
    dark: float = 0.5
    cast: float = 0.1
    quality: int = 20

    def __post_init__(self) -> None:
        if not self.photos:
            raise RedlineError("no training data: set photos to a folder under [data], or pass --photos.")
        if self.frame_px < 8 or self.world_px < self.frame_px:
            raise RedlineError(
                f"frame_px must be at least 8 and world_px at least frame_px, not {self.frame_px} and {self.world_px}."
            )
        if self.batch < 1:
            raise RedlineError(f"batch must be above zero, not {self.batch}.")
        for name in ("still", "objects", "cuts", "dark", "cast"):
            if not 0 <= getattr(self, name) <= 1:
                raise RedlineError(f"{name} must be from 0 to 1, not {getattr(self, name)}.")
        if self.dark == 1 or self.cast == 1:
            raise RedlineError("dark and cast must be below 1, because a black image cannot be restored.")
        for name in ("pan_px", "zoom", "turn", "noise", "blur_px"):
            if getattr(self, name) < 0:
                raise RedlineError(f"{name} must not be negative, not {getattr(self, name)}.")
        if not 1 <= self.quality <= 100:
            raise RedlineError(f"quality must be from 1 to 100, not {self.quality}.")
