"""Structured pruning: remove channels and attention heads together with everything that depends on them."""
