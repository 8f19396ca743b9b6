"""Proves that the rows of an ONNX model do not depend on each other, so that requests can be merged along the first axis."""
