"""Judging candidates: accuracy and speed relative to the original, and the contract on both."""
