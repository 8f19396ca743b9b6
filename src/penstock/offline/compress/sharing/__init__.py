"""Weights that share a codebook per layer (Deep Compression, Han et al. 2016, §3), to be written down by ``bundle.coded``."""
