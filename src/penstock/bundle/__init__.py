"""Bundles: the one file that the offline half writes and the online half reads."""
