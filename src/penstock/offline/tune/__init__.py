"""Tuning: the candidates, the tuner that measures them, and the rules that choose one."""
