"""Runs live video through a diffusion model. The entry point is `redline.Stream`."""
