"""Several processes on one upscaling: on the GPUs of one machine, or as the ranks of torchrun on many."""
