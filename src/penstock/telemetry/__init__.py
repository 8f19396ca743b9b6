"""Telemetry: statistics, metrics, traces and logs. It is called by the rest of the server and imports none of it."""
