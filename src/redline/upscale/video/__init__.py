"""Decodes, upscales and encodes videos; copies the other streams and metadata of the file."""

from redline.upscale.video.encoders import available_codecs, check_encoding
from redline.upscale.video.frames import RgbFrame, open_frames
from redline.upscale.video.parts import notes_on_parts, tiles_of_parts
from redline.upscale.video.probe import VideoInfo, probe
from redline.upscale.video.run import upscale_video
from redline.upscale.video.settings import TARGETS, VideoProgress, VideoResult, VideoSettings

__all__ = [
    "TARGETS",
    "VideoInfo",
    "RgbFrame",
    "VideoProgress",
    "VideoResult",
    "VideoSettings",
    "available_codecs",
    "check_encoding",
    "open_frames",
    "probe",
    "notes_on_parts",
    "tiles_of_parts",
    "upscale_video",
]
