"""The parts of the converters of scikit-learn and boosters: models of tables, written as ONNX of our own."""
