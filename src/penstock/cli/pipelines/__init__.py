"""Commands on pipelines."""
