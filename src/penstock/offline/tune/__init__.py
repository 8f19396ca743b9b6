"""Tuning: the space of candidates, the tuner that measures them, and the rules that choose one."""
