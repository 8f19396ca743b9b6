"""Judging candidates: accuracy and speed against the original, and the contract that both must meet."""
