"""Super-resolution of images, folders and videos."""
