"""The inputs of a model: what each one seems to mean, and plausible values for it."""
