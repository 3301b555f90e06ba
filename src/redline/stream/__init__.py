"""Live video through a diffusion model. `redline.Stream` is the entry point; `redline.stream.pipeline` runs the frames."""
