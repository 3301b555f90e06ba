"""Training: one loop for every kind of model, and the task that each kind implements."""
