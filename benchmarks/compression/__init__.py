"""What the compression scenario runs on, and its parts: data, small networks, their training."""
