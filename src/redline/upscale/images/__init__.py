"""Reads and writes image files row by row in constant memory, with colours, transparency and metadata."""

from redline.upscale.images.colour import from_planes, premultiply, to_planes, unpremultiply
from redline.upscale.images.encoding import Encoding
from redline.upscale.images.errors import ImageError, UnsupportedImage
from redline.upscale.images.formats import FORMATS, Format, check_can_hold, format_for, format_named
from redline.upscale.images.metadata import Metadata
from redline.upscale.images.sink import MEMORY_LIMIT_BYTES, ImageSink, create_image
from redline.upscale.images.source import ImageSource, open_image, sniffed

__all__ = [
    "FORMATS",
    "MEMORY_LIMIT_BYTES",
    "Encoding",
    "Format",
    "Metadata",
    "ImageError",
    "ImageSink",
    "ImageSource",
    "UnsupportedImage",
    "check_can_hold",
    "create_image",
    "format_for",
    "format_named",
    "from_planes",
    "open_image",
    "premultiply",
    "sniffed",
    "to_planes",
    "unpremultiply",
]
