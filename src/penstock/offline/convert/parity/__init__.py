"""Parity: compares a framework's model with its ONNX model, and finds the first node that differs."""
