"""FP32 versions of models that compute in other types, or that are already quantised."""
