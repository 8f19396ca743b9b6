"""The repository: which models and versions are there, loading them, and letting go of them."""
