"""Upscaling with several processes: on the GPUs of one machine, or as the ranks of torchrun on several."""
