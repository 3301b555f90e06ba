"""Before/after comparison pages of upscaled images and videos."""
