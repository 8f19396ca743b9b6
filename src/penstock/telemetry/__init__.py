"""Telemetry: statistics, metrics, traces and logs. The server imports this package; the package imports nothing from the server."""
