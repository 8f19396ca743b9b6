"""Attackers for ``benchmarks.scenarios.hostile`` and the soak: one file per family, raw bytes over loopback connections.

``python -m benchmarks.attacks NAME --http HOST:PORT --grpc HOST:PORT`` runs one attack and prints what it counted.
"""
