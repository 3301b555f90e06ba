"""A page on which each enlarged image lies over its source, with a divider to drag between them."""

from redline.upscale.compare.page import check_page, write_comparison

__all__ = ["check_page", "write_comparison"]
