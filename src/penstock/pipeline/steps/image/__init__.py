"""Steps on pictures: decoding, geometry, and the form that models read."""
