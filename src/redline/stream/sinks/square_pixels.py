"""Converts frames to square pixels, for displays that do not know the pixel aspect ratio."""

from PIL import Image

from redline.stream.frames import Frame, square_size


def as_square_pixels(frame: Frame) -> Image.Image:
    image = Image.fromarray(frame.pixels.numpy())
    height, width = square_size(frame.height, frame.width, frame.pixel_aspect)
    if (height, width) == (frame.height, frame.width):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)
