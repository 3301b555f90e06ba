"""Two U-Nets in sequence for live video diffusion."""

from redline.models.unet.model import MULTIPLIERS, STEPS, UNet, VideoUNet

__all__ = ["MULTIPLIERS", "STEPS", "UNet", "VideoUNet"]
