"""Reads, checks, completes and writes model configurations in Triton's schema."""
