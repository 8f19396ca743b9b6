"""What each operator does to the rows of its inputs, by family of operators."""
