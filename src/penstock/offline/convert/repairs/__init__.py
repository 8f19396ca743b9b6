"""Repairs of known faults that exporters leave in ONNX models. Each file repairs or diagnoses one fault."""
