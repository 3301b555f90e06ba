"""Errors of image files."""

from redline.errors import RedlineError


class ImageError(RedlineError):
    """Raised for an image that cannot be read or written, or that a format cannot hold."""


class UnsupportedImage(ImageError):
    """Raised for an image in a known but unsupported format."""
