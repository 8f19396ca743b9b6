"""Tuning: the candidates, the contract that judges them, and the tuner that measures and chooses."""
