"""A residual convolutional classifier."""

from redline.models.resnet.model import ResNet

__all__ = ["ResNet"]
