"""Records of individual requests: traces, access log, and requests stored for warm-up."""
