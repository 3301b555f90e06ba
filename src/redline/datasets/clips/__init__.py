"""Synthetic clips for training and evaluation: a virtual camera moves over photos, so that all motion is known."""

from redline.datasets.clips.clips import Clips, Frame
from redline.datasets.clips.degradation import Degradation
from redline.datasets.clips.settings import ClipSettings
from redline.datasets.clips.warp import warp, warp_error

__all__ = ["ClipSettings", "Clips", "Degradation", "Frame", "warp", "warp_error"]
