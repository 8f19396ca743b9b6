"""Runs functions: one item or a stream of items at a time, with batches of model calls."""
