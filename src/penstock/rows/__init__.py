"""Proves that the rows of an ONNX model are independent of each other, so that requests can be merged along the first axis."""
