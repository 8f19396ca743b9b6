"""Pruning: weights set to zero (magnitude, N:M, iteratively with retraining); neurons, channels and heads taken out."""
