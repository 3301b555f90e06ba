"""Training a live video diffusion model: its stages, what it is shown as its past, how it is judged."""
