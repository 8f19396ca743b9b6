"""Which precision each part of a model keeps: dynamic and weight-only integers, half floats, sensitivity and mixed precision."""
