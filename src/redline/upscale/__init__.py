"""Super-resolution of images, folders and videos: tiles, files, and what runs them."""
