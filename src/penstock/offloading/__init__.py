"""Offloading: the same call runs on this device or on a server, whichever is better, with a fall-back both ways."""
