"""Precisions other than calibrated INT8: dynamic INT8, weight-only integers, 16-bit floats; sensitivity and mixed precision."""
