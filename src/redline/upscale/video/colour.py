"""Which colours a video's numbers stand for: the matrix and range between YUV and RGB, and the tags players read.

A video that names no matrix is shown by players with one guessed from its size, and enlarging changes the size: so the
guess is made here, from the source's size, and the enlarged video names it.
"""

from dataclasses import dataclass, replace

from av.video.frame import VideoFrame

from redline.errors import RedlineError

RGB, BT709, UNSPECIFIED, RESERVED, BT601 = 0, 1, 2, 3, 6
FULL_RANGE = 2
# Shares of red and of blue in the luma, by the matrix's number in the standards (ITU-T H.273).
_LUMA = {
    BT709: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    BT601: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
_NAMES = {BT709: "BT.709", BT601: "BT.601"}


@dataclass(frozen=True)
class Colour:
    """Numbers of ITU-T H.273 for matrix, primaries and transfer, and whether black is 0 rather than 16."""

    matrix: int
    primaries: int
    transfer: int
    full_range: bool

    @property
    def luma(self) -> tuple[float, float]:
        return _LUMA[self.matrix]

    @property
    def range_tag(self) -> int:
        return FULL_RANGE if self.full_range else 1

    def as_rgb(self) -> "Colour":
        return replace(self, matrix=RGB, full_range=True)

    def as_yuv(self) -> "Colour":
        """RGB has no matrix: its YUV form takes the one that every player knows."""
        return replace(self, matrix=BT709, full_range=False) if self.matrix == RGB else self

    def tag(self, tagged: object) -> None:
        """Writes the tags to a frame or to a codec context: both name them alike."""
        for name, value in (
            ("colorspace", self.matrix),
            ("color_primaries", self.primaries),
            ("color_trc", self.transfer),
            ("color_range", self.range_tag),
        ):
            setattr(tagged, name, value)


def colour_of(frame: VideoFrame) -> tuple[Colour, list[str]]:
    """The colours of a decoded frame, and a note where they had to be guessed."""
    grey = len(frame.format.components) < 3
    full = frame.color_range == FULL_RANGE or frame.format.name.startswith("yuvj")
    # Untagged grey has no legacy of 16 … 235: decoders of grey formats mean 0 … 255.
    full = full or (grey and frame.color_range == 0)
    tags = (int(frame.color_primaries), int(frame.color_trc))
    if frame.format.is_rgb or frame.format.has_palette:
        return Colour(RGB, *tags, True), []
    matrix = int(frame.colorspace)
    if matrix in _LUMA:
        return Colour(matrix, *tags, full), []
    if matrix not in (UNSPECIFIED, RESERVED) and not grey:
        raise RedlineError(f"the video's colour matrix (number {matrix} of ITU-T H.273) is not one that is known here.")
    guess = BT709 if frame.width >= 1280 or frame.height >= 720 else BT601
    note = f"the video names no colour matrix: {_NAMES[guess]} is taken, as players do at its size, and written down"
    return Colour(guess, *tags, full), [] if grey else [note]
