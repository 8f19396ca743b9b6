"""Storage of files: the interface for listing, reading, writing and publishing, and atomic writes."""
