"""Reads samples of any kind: npz and npy files, folders, JSON lines, CSV, and Python iterables."""
