"""Structured pruning: remove channels and attention heads together with everything coupled to them."""
