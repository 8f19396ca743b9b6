"""Triton's model configuration: its text, rules, checks, and completion."""
