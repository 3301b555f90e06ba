"""Super-resolution of pictures, folders and films: tiles, files, and what runs them."""
