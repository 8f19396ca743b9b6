"""The parts of the TensorFlow and TensorFlow Lite converters."""
