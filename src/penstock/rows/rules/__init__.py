"""The effect of each operator on the rows of its inputs, by family of operators."""
