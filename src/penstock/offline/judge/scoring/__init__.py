"""The metrics, by the kind of output that they judge."""
