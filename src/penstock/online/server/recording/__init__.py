"""Records of single requests: traces, access log, and requests kept for warm-up."""
