"""Clips to train on and to judge by: a camera that moves over photos, so that every motion is known to the pixel."""

from redline.datasets.clips.clips import Clips, Frame
from redline.datasets.clips.degradation import Degradation
from redline.datasets.clips.settings import ClipSettings
from redline.datasets.clips.warp import warp, warp_error

__all__ = ["ClipSettings", "Clips", "Degradation", "Frame", "warp", "warp_error"]
