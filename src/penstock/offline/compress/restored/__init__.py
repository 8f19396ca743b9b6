"""Undo a compression method's change of a model's numbers. The result must equal the method's input model."""
