"""Access control: keys, limits per client, and restricted endpoints."""
