"""Precisions other than calibrated INT8: dynamic and weight-only integers, 16-bit floats, sensitivity and mixed precision."""
