"""Training of a live video diffusion model: its stages, history frames and validation."""
