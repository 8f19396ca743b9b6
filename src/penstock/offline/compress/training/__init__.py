"""Training on the ONNX graph itself, with torch; everything here needs the extra ``torch``, and nothing outside imports torch."""
