"""Coded models (Deep Compression, Han et al. 2016): Huffman-coded weights in a container that decodes to the exact model file."""

from penstock.bundle.coded.container import MAGIC, MAX_BYTES, CodingOptions, decode, encode
from penstock.bundle.coded.summary import Summary, TensorSummary, describe

__all__ = ["MAGIC", "MAX_BYTES", "CodingOptions", "Summary", "TensorSummary", "decode", "describe", "encode"]
