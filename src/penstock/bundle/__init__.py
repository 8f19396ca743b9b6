"""Bundles: the file format that the offline half writes and the online half reads."""
