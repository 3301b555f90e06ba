"""A vision transformer whose attention is written out by hand."""

from redline.models.vit.model import Attention, VisionTransformer

__all__ = ["Attention", "VisionTransformer"]
