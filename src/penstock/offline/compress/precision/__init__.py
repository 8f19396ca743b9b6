"""The precision of each part of a model: dynamic and weight-only integers, half floats, sensitivity and mixed precision."""
