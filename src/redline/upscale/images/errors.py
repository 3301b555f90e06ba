"""What goes wrong with picture files."""

from redline.errors import RedlineError


class PictureError(RedlineError):
    """A picture that cannot be read or written, or a format that cannot hold it."""


class UnsupportedPicture(PictureError):
    """A picture in a format that is known and not read."""
