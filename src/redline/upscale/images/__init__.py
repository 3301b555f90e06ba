"""Reads and writes image files row by row in constant memory, with colours, transparency and metadata."""
