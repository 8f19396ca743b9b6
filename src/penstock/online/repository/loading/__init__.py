"""Loads and warms up a resolved version, and assembles its handle."""
