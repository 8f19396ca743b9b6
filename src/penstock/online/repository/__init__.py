"""The repository: finds, loads and unloads models and their versions."""
