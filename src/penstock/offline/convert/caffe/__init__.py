"""Caffe without Caffe: reads networks and weights, computes them by Caffe's formulas in numpy, and writes them as ONNX."""
