"""The parts of the PyTorch converter."""
