"""The parts of the JAX converter."""
