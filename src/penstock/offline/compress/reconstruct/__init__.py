"""Reconstruction: round weights so that the error of each layer's results is small, instead of the error of each weight."""
