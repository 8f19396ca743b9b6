"""The metrics, by the kind of answer that they judge."""
