"""Steps on sound."""
