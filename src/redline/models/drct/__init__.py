"""DRCT, a super-resolution transformer, and its checkpoints."""

from redline.models.drct.checkpoint import load_drct, read_drct, save_drct
from redline.models.drct.config import DrctConfig
from redline.models.drct.model import Drct

__all__ = ["Drct", "DrctConfig", "load_drct", "read_drct", "save_drct"]
