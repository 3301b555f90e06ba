"""What goes wrong with image files."""

from redline.errors import RedlineError


class ImageError(RedlineError):
    """A image that cannot be read or written, or a format that cannot hold it."""


class UnsupportedImage(ImageError):
    """A image in a format that is known and not read."""
