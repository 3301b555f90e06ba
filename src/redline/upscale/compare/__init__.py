"""Before/after comparison pages of upscaled images and videos."""

from redline.upscale.compare.page import check_page, write_comparison

__all__ = ["check_page", "write_comparison"]
