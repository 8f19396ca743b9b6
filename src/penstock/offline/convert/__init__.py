"""Convert: turns a model of any framework into ONNX, and proves that its answers did not change."""
