"""LSD (live stream diffusion): a causal video-to-video U-Net in four sizes, and its checkpoints."""

from redline.models.lsd.checkpoint import load_lsd, read_about, save_lsd
from redline.models.lsd.config import SIZES, LsdConfig
from redline.models.lsd.model import PREDICTION, PROCESS, Lsd

__all__ = ["PREDICTION", "PROCESS", "SIZES", "Lsd", "LsdConfig", "load_lsd", "read_about", "save_lsd"]
