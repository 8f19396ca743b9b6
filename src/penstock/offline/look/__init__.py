"""Looks into a model file before any work: its inputs, operators, size, engines, and what a build could do."""
