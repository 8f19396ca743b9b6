"""Pruning: set weights to zero (by magnitude, N:M, or iteratively with retraining), or remove channels and attention heads."""
