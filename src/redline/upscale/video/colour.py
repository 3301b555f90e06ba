"""The colour matrix and range between YUV and RGB, and the tags that players read.

If a video names no matrix, players guess one from its size. Upscaling changes the size, so the guess is made here from
the size of the source, and written into the result.
"""

from dataclasses import dataclass, replace

from av.video.frame import VideoFrame

from redline.errors import RedlineError

RGB, BT709, UNSPECIFIED, RESERVED, BT601 = 0, 1, 2, 3, 6
FULL_RANGE = 2
# The weights of red and blue in luma, by the number of the matrix in ITU-T H.273.
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
    """Matrix, primaries and transfer as numbers of ITU-T H.273, and whether black is 0 instead of 16."""

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
        """Returns the colours for YUV; RGB, which has no matrix, becomes BT.709, which every player knows."""
        return replace(self, matrix=BT709, full_range=False) if self.matrix == RGB else self

    def tag(self, tagged: object) -> None:
        """Writes the tags to a frame or a codec context, which have the same attributes."""
        for name, value in (
            ("colorspace", self.matrix),
            ("color_primaries", self.primaries),
            ("color_trc", self.transfer),
            ("color_range", self.range_tag),
        ):
            setattr(tagged, name, value)


def colour_of(frame: VideoFrame) -> tuple[Colour, list[str]]:
    """Returns the colours of a decoded frame, and a note if they were guessed."""
    grey = len(frame.format.components) < 3
    full = frame.color_range == FULL_RANGE or frame.format.name.startswith("yuvj")
    # Decoders of grey formats use the full range unless tagged otherwise.
    full = full or (grey and frame.color_range == 0)
    tags = (int(frame.color_primaries), int(frame.color_trc))
    if frame.format.is_rgb or frame.format.has_palette:
        return Colour(RGB, *tags, True), []
    matrix = int(frame.colorspace)
    if matrix in _LUMA:
        return Colour(matrix, *tags, full), []
    if matrix not in (UNSPECIFIED, RESERVED) and not grey:
        raise RedlineError(f"the video's colour matrix (number {matrix} of ITU-T H.273) is not supported.")
    guess = BT709 if frame.width >= 1280 or frame.height >= 720 else BT601
    note = f"the video names no colour matrix: {_NAMES[guess]} is assumed, as players do for its size, and written"
    return Colour(guess, *tags, full), [] if grey else [note]
