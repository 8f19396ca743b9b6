"""Undo what a compression method did to a model's numbers, so that the result must equal the model that the method was given."""
