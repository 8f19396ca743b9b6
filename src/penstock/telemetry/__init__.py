"""Telemetry: statistics, metrics, traces and logs. It is told what happened and knows nobody."""
