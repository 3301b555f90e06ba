"""Decodes, upscales and encodes videos; copies the other streams and metadata of the file."""
