"""Telemetry: statistics, metrics, traces and logs. The rest of the server calls it; it imports nothing from the rest."""
