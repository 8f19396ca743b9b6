"""Penstock: from a trained model to a served one, with every decision measured."""

__version__ = "0.1.0"
