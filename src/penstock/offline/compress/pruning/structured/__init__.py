"""Channels and attention heads removed together with everything coupled to them."""
