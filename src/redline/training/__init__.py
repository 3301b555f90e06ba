"""Training: one loop for every kind of model, and what each kind brings to it."""
