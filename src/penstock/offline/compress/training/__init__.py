"""Training on the ONNX graph, with torch. This package needs the extra ``torch``; no other part of ``compress`` imports torch."""
