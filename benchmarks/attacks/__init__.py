"""Attacks for ``benchmarks.scenarios.hostile`` and the soak test. Attackers send raw bytes over loopback connections. There is one
file per kind of attack.

``python -m benchmarks.attacks NAME --http HOST:PORT --grpc HOST:PORT`` runs one attack and prints its counts.
"""
