"""Which photos a clip is made of, how its camera moves, and how poor the camera is."""

from dataclasses import dataclass

from redline.errors import RedlineError


@dataclass(frozen=True)
class ClipSettings:
    """`world_px` is the side of the piece of photo that a clip moves over, `frame_px` of what the camera sees of it.

    Motions are at most: `pan_px` pixels a frame, `zoom` as a share, `turn` in radians. `still`, `objects` and `cuts`
    are the shares of clips with a camera that stands, with something that passes by, and with a cut. Of a poor camera,
    at most: `noise` as a standard deviation (in good light), `blur_px` as one, `dark` as the share of light lost, which
    the camera's gain mostly makes up for, `cast` as a share of each colour; `quality` is the lowest JPEG quality.
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
            raise RedlineError("there is nothing to train on: name a folder of photos under [data] or with --photos.")
        if self.frame_px < 8 or self.world_px < self.frame_px:
            raise RedlineError("a frame has 8 pixels a side or more, and world_px is at least as many as frame_px.")
        if self.batch < 1:
            raise RedlineError(f"batch must be above zero, not {self.batch}.")
        for name in ("still", "objects", "cuts", "dark", "cast"):
            if not 0 <= getattr(self, name) <= 1:
                raise RedlineError(f"{name} is a share from 0 to 1, not {getattr(self, name)}.")
        if self.dark == 1 or self.cast == 1:
            raise RedlineError("dark and cast are less than 1: of a black picture nothing can be restored.")
        for name in ("pan_px", "zoom", "turn", "noise", "blur_px"):
            if getattr(self, name) < 0:
                raise RedlineError(f"{name} must not be negative, as {getattr(self, name)} is.")
        if not 1 <= self.quality <= 100:
            raise RedlineError(f"quality is from 1 to 100, not {self.quality}.")
