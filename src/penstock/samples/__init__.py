"""Reads samples of any kind: npz and npy files, folders, images, sounds, JSON lines, tables, and Python iterables."""
