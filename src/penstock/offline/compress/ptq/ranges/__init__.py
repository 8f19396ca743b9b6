"""INT8 ranges: histograms of tensors, and ways to choose a range from them."""
