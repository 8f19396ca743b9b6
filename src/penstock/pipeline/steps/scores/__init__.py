"""Steps on a model's scores."""
