"""A frame as people are to see it where nobody is told the shape of its pixels."""

from PIL import Image

from redline.stream.frames import Frame, square_size


def as_square_pixels(frame: Frame) -> Image.Image:
    """In square pixels."""
    picture = Image.fromarray(frame.pixels.numpy())
    height, width = square_size(frame.height, frame.width, frame.pixel_aspect)
    if (height, width) == (frame.height, frame.width):
        return picture
    return picture.resize((width, height), Image.Resampling.BICUBIC)
