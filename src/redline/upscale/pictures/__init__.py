"""Picture files: rows in, rows out, with their colours, transparency and metadata, in constant memory."""

from redline.upscale.pictures.colour import from_planes, premultiply, to_planes, unpremultiply
from redline.upscale.pictures.encoding import Encoding
from redline.upscale.pictures.errors import PictureError, UnsupportedPicture
from redline.upscale.pictures.formats import FORMATS, Format, check_can_hold, format_for, format_named
from redline.upscale.pictures.metadata import Metadata
from redline.upscale.pictures.sink import MEMORY_LIMIT_BYTES, PictureSink, create_picture
from redline.upscale.pictures.source import PictureSource, open_picture, sniffed

__all__ = [
    "FORMATS",
    "MEMORY_LIMIT_BYTES",
    "Encoding",
    "Format",
    "Metadata",
    "PictureError",
    "PictureSink",
    "PictureSource",
    "UnsupportedPicture",
    "check_can_hold",
    "create_picture",
    "format_for",
    "format_named",
    "from_planes",
    "open_picture",
    "premultiply",
    "sniffed",
    "to_planes",
    "unpremultiply",
]
